"""What Hypha nodes say to each other: message structs, strict CBOR and JSON codec, protocol ids, job specs and update files."""
