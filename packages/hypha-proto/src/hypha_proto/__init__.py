"""What Hypha nodes say to each other: messages, strict CBOR and JSON codec, protocol ids, jobs and update files."""
