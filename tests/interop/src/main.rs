//! A peer for tests: rust-libp2p's own transport, muxer and behaviours under Hypha's security upgrade.
//!
//! It is told what to do by one JSON object a line on its standard input, and tells what happens as one JSON object a
//! line on its standard output. Its only argument is a JSON object: `identity` (prefix of its files), `listen`
//! (addresses), and optionally `relay`, `idle`, `ping`, `dcutr`, `kad_server`.

mod messages;
mod peer;
mod security;
mod streams;

use std::{error::Error, io::Write};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    sync::mpsc,
};

/// One line on standard output.
pub fn tell(what: Value) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{what}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0); // nobody listens any more
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let settings: peer::Settings = serde_json::from_str(&std::env::args().nth(1).ok_or("one argument: settings as JSON")?)?;
    let (sender, commands) = mpsc::channel(64);
    tokio::spawn(async move {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let command: Value = serde_json::from_str(&line).expect("a command is JSON");
            if sender.send(command).await.is_err() {
                break;
            }
        }
    });
    peer::run(settings, commands).await
}
