"""Answers to workers that ask where a result is: whom to pull it from, or which holders push it. Pure."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    PUSH_OUTPUT,
    AwaitPush,
    LocatedFile,
    PullFiles,
    PushedFile,
    PushOutput,
    ResourceLocation,
)
from hypha_scheduler.strategies.base import SendMessage
from hypha_scheduler.strategies.tasks.output_holders import MadeOutput


def to_pull(parts: Sequence[MadeOutput], scheduler: PeerId) -> ResourceLocation:
    """Answer that the parts of a result are to be pulled from their holders, or from the scheduler's copies."""
    files = tuple(
        LocatedFile(
            path=path,
            dataset=part.output.dataset,
            index=index,
            size=part.output.files[index].size,
            digest=part.output.files[index].digest,
            peers=_holders(part, scheduler),
        )
        for part, index, path in _files(parts)
    )
    return ResourceLocation(pull=PullFiles(files=files))


def to_push(
    parts: Sequence[MadeOutput], job: uuid.UUID, delivery: uuid.UUID, to: PeerId, tag: str
) -> tuple[ResourceLocation, tuple[SendMessage, ...]]:
    """Answer that holders push the parts of a result, and tell them to; each part has a holder."""
    files: list[LocatedFile] = []
    asked: defaultdict[PeerId, list[PushedFile]] = defaultdict(list)
    for part, index, path in _files(parts):
        file = part.output.files[index]
        assert part.holder is not None
        asked[part.holder].append(PushedFile(dataset=part.output.dataset, index=index, name=str(len(files))))
        files.append(
            LocatedFile(path=path, dataset=part.output.dataset, index=index, size=file.size, digest=file.digest)
        )
    answer = AwaitPush(delivery=delivery, files=tuple(files), senders=tuple(asked))
    messages = tuple(
        SendMessage(
            holder,
            PUSH_OUTPUT,
            PushOutput(job_id=job, delivery=delivery, to=to, files=tuple(found)),
            f"{tag}:{holder}",
            retry_delays=(0.5,),
            span="push output",
        )
        for holder, found in asked.items()
    )
    return ResourceLocation(pushed=answer), messages


def _files(parts: Sequence[MadeOutput]) -> Iterator[tuple[MadeOutput, int, str]]:
    """Yield part, index and path of each file: the parts of several instances are entries named by their index."""
    for number, part in enumerate(parts):
        for index, file in enumerate(part.output.files):
            folder = (str(number),) if len(parts) > 1 else ()
            yield part, index, "/".join((*folder, *filter(None, (file.path,))))


def _holders(part: MadeOutput, scheduler: PeerId) -> tuple[PeerId, ...]:
    holder = () if part.holder is None else (part.holder,)
    return holder if part.copy is None else (*holder, scheduler)
