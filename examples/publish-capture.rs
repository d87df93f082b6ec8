//! Publishes a recorded stream as the engine did.
//!
//! `cargo run --example publish-capture -- FILE.jsonl.gz ENDPOINT [STREAM]` binds
//! ENDPOINT, waits for a subscriber, sends it the recorded messages in order and
//! stays up until ctrl-c, as an engine would. STREAM picks one of several
//! recorded sockets; the first is the default. Who subscribes later gets nothing:
//! a publisher keeps no history.

use std::error::Error;
use std::fs::File;
use std::io::Read;

use bytes::Bytes;
use flate2::read::GzDecoder;
use serde_json::Value;
use zeromq::{Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

/// The frames of the messages that a subscriber of `stream` received.
fn recorded(file: &str, stream: Option<&str>) -> Result<Vec<Vec<Bytes>>, Box<dyn Error>> {
    let mut text = String::new();
    GzDecoder::new(File::open(file).map_err(|error| format!("{file}: {error}"))?)
        .read_to_string(&mut text)?;
    let mut wanted = stream.map(str::to_owned);
    let mut messages = Vec::new();
    for line in text.lines().skip(1) {
        let message: Value = serde_json::from_str(line)?;
        let of = message["stream"].as_str().unwrap_or_default();
        let wanted = wanted.get_or_insert_with(|| of.to_owned());
        if of == *wanted && message["via"] == "sub" {
            let frames = message["frames"].as_array().ok_or("a message without frames")?;
            messages.push(
                frames
                    .iter()
                    .map(|frame| unhex(frame.as_str().unwrap_or_default()))
                    .collect::<Result<_, _>>()?,
            );
        }
    }
    if messages.is_empty() {
        return Err(format!("{file} has no messages of stream {}", wanted.unwrap_or_default()).into());
    }
    Ok(messages)
}

/// Returns once somebody has subscribed.
async fn joined(socket: &mut XPubSocket) {
    loop {
        // An error is a connection that broke; the next one may hold.
        let Ok(message) = socket.recv().await else { continue };
        if message.get(0).is_some_and(|frame| frame.first() == Some(&1)) {
            return;
        }
    }
}

fn unhex(text: &str) -> Result<Bytes, Box<dyn Error>> {
    let digits: Vec<u32> =
        text.chars().map(|digit| digit.to_digit(16).ok_or("not hex")).collect::<Result<_, _>>()?;
    Ok(digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte * 16 + *digit as u8)).collect())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, endpoint, stream @ ..] = arguments.as_slice() else {
        return Err("usage: publish-capture FILE.jsonl.gz ENDPOINT [STREAM]".into());
    };
    let messages = recorded(file, stream.first().map(String::as_str))?;
    // An engine's socket is a PUB; an XPUB also shows who subscribes.
    let mut socket = XPubSocket::new();
    let bound = socket.bind(endpoint).await?;
    println!("{bound}: {} messages to send, waiting for a subscriber", messages.len());
    joined(&mut socket).await;
    for frames in &messages {
        let message = ZmqMessage::try_from(frames.clone()).map_err(|_| "a message without frames")?;
        socket.send(message).await?;
    }
    println!("sent {} messages; ctrl-c to stop", messages.len());
    tokio::signal::ctrl_c().await?;
    Ok(())
}
