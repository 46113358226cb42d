"""Length-delimited framing and protobuf classes shared by the libp2p protocols."""
