//! Streams of bytes: served here, and opened to others. Each gives what it saw as JSON.

use std::{io, time::Duration};

use futures::{future::try_join_all, AsyncReadExt, AsyncWriteExt, StreamExt};
use libp2p::{PeerId, Stream, StreamProtocol};
use libp2p_stream::Control;
use serde_json::{json, Value};
use tokio::time::{sleep, timeout};

use crate::tell;

pub const ECHO: StreamProtocol = StreamProtocol::new("/interop/echo/1");
pub const SINK: StreamProtocol = StreamProtocol::new("/interop/sink/1");
pub const SOURCE: StreamProtocol = StreamProtocol::new("/interop/source/1");
pub const RESET: StreamProtocol = StreamProtocol::new("/interop/reset/1");
const CHUNK: usize = 64 << 10;

/// Bytes that show when some are lost or swapped.
pub fn pattern(offset: u64, size: usize) -> Vec<u8> {
    (offset..offset + size as u64).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

/// Serve all protocols.
pub fn serve(control: &mut Control) {
    for protocol in [ECHO, SINK, SOURCE, RESET] {
        let mut incoming = control.accept(protocol.clone()).expect("accepted once");
        tokio::spawn(async move {
            while let Some((peer, stream)) = incoming.next().await {
                let protocol = protocol.clone();
                tokio::spawn(async move {
                    let seen = answer(&protocol, stream).await;
                    tell(with_result(json!({"kind": "served", "peer": peer.to_string(), "protocol": protocol.to_string()}), seen));
                });
            }
        });
    }
}

pub fn with_result(mut told: Value, result: io::Result<Value>) -> Value {
    match result {
        Ok(value) => told["result"] = value,
        Err(error) => told["error"] = json!(format!("{:?}: {error}", error.kind())),
    }
    told
}

async fn answer(protocol: &StreamProtocol, mut stream: Stream) -> io::Result<Value> {
    if *protocol == RESET {
        let mut byte = [0];
        stream.read_exact(&mut byte).await?;
        drop(stream); // neither side has ended: a reset
        return Ok(json!("dropped"));
    }
    if *protocol == ECHO {
        let (mut from, mut to) = stream.split();
        let copied = futures::io::copy(&mut from, &mut to).await?;
        to.close().await?;
        return Ok(json!(copied));
    }
    if *protocol == SINK {
        let seen = check(&mut stream).await?;
        stream.write_all(&seen.to_le_bytes()).await?;
        stream.close().await?;
        return Ok(json!(seen));
    }
    let mut size = [0; 8];
    stream.read_exact(&mut size).await?;
    let size = u64::from_le_bytes(size);
    fill(&mut stream, size).await?;
    stream.close().await?;
    Ok(json!(size))
}

async fn fill(stream: &mut Stream, size: u64) -> io::Result<()> {
    let mut sent = 0;
    while sent < size {
        let part = pattern(sent, CHUNK.min((size - sent) as usize));
        stream.write_all(&part).await?;
        sent += part.len() as u64;
    }
    stream.flush().await
}

/// Read the pattern to the end of the stream; how many bytes came.
async fn check(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<u64> {
    let mut seen = 0;
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(seen);
        }
        if buffer[..count] != pattern(seen, count) {
            return Err(io::Error::other(format!("wrong bytes behind {seen}")));
        }
        seen += count as u64;
    }
}

async fn open(control: &mut Control, peer: PeerId, protocol: StreamProtocol) -> io::Result<Stream> {
    control.open_stream(peer, protocol).await.map_err(|error| io::Error::other(error.to_string()))
}

/// Send `size` bytes, half-close, and hear how many came.
pub async fn send(mut control: Control, peer: PeerId, size: u64) -> io::Result<Value> {
    let mut stream = open(&mut control, peer, SINK).await?;
    fill(&mut stream, size).await?;
    stream.close().await?;
    let mut seen = [0; 8];
    stream.read_exact(&mut seen).await?;
    Ok(json!(u64::from_le_bytes(seen)))
}

/// Ask for `size` bytes and check them.
pub async fn receive(mut control: Control, peer: PeerId, size: u64) -> io::Result<Value> {
    let mut stream = open(&mut control, peer, SOURCE).await?;
    stream.write_all(&size.to_le_bytes()).await?;
    stream.close().await?;
    Ok(json!(check(&mut stream).await?))
}

/// Open `count` streams, keep all of them open at once, then pass `size` bytes through each.
pub async fn many(mut control: Control, peer: PeerId, count: u64, size: u64) -> io::Result<Value> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let mut stream = open(&mut control, peer, ECHO).await?;
        stream.write_all(&pattern(0, 1)).await?;
        stream.flush().await?;
        streams.push(stream);
    }
    let passed = try_join_all(streams.into_iter().map(|mut stream| async move {
        stream.write_all(&pattern(1, size as usize - 1)).await?;
        stream.close().await?;
        check(&mut stream).await
    }))
    .await?;
    Ok(json!(passed.iter().filter(|&&seen| seen == size).count()))
}

/// Open a stream and say nothing on it for so many seconds, then echo a byte.
pub async fn hold(mut control: Control, peer: PeerId, seconds: f64) -> io::Result<Value> {
    let mut stream = open(&mut control, peer, ECHO).await?;
    stream.write_all(&pattern(0, 1)).await?;
    stream.flush().await?;
    tell(json!({"kind": "holding", "peer": peer.to_string()}));
    sleep(Duration::from_secs_f64(seconds)).await;
    stream.close().await?;
    Ok(json!(check(&mut stream).await?))
}

/// How a stream ends that the other side resets.
pub async fn be_reset(mut control: Control, peer: PeerId) -> io::Result<Value> {
    let mut stream = open(&mut control, peer, RESET).await?;
    stream.write_all(b"x").await?;
    stream.flush().await?;
    let mut rest = Vec::new();
    timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await??;
    Ok(json!(rest.len()))
}
