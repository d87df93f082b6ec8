//! An engine's publisher that never rests, to see what a bridge does with its time.
//!
//! Turns of conversations are stored and, half a ring later, removed again, so that the index keeps its
//! size. Batches are made beforehand and sent as fast as the subscriber reads them: where a ZeroMQ library's
//! socket would drop, this waits.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use rmp::encode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::plan::seeded;
use crate::bridge::zmtp::ZmtpError;
use crate::bridge::zmtp::wire::{self, Item, Reader};
use crate::cli::{Environment, Failure, Outcome};

/// Blocks of a turn.
const TURN_BLOCKS: usize = 32;
/// Token ids of a block.
const BLOCK_TOKENS: usize = 64;
/// Turns of the ring; half of them are held.
const TURNS: usize = 2_048;
/// Size of a vocabulary.
const VOCABULARY: u64 = 150_000;

/// Takes one subscriber and floods it for so long or until it leaves.
pub(super) async fn run(
    listener: TcpListener,
    time: Duration,
    environment: &mut Environment<'_>,
) -> Result<Outcome, Failure> {
    let batches = batches();
    let joined = async { shake_hands(listener.accept().await?.0).await };
    let mut socket = joined.await.map_err(|error: ZmtpError| Failure::NoAnswer(error.to_string()))?;
    let (start, mut sent, mut bytes) = (Instant::now(), 0_u64, 0_u64);
    let mut out = BytesMut::new();
    while start.elapsed() < time {
        let payload = &batches[sent as usize % TURNS];
        out.clear();
        wire::write_message(&mut out, &[b"", &sent.to_be_bytes(), payload]);
        if socket.write_all(&out).await.is_err() {
            break;
        }
        sent += 1;
        bytes += payload.len() as u64;
    }
    let seconds = start.elapsed().as_secs_f64();
    let (batches, blocks) = (sent as f64 / seconds, (sent * TURN_BLOCKS as u64) as f64 / seconds);
    let megabytes = bytes as f64 / seconds / 1e6;
    writeln!(environment.out, "{batches:.0} batches, {blocks:.0} blocks, {megabytes:.1} MB a second")?;
    Ok(Outcome::found(sent > 0))
}

/// Greets a subscriber and takes its subscription.
async fn shake_hands(mut socket: TcpStream) -> Result<TcpStream, ZmtpError> {
    let (mut reader, mut out) = (Reader::default(), BytesMut::new());
    wire::write_greeting(&mut out);
    wire::write_ready(&mut out, "PUB");
    socket.write_all(&out).await?;
    let mut greeted = false;
    loop {
        greeted = greeted || reader.greeting()?.is_some();
        // The other side's READY comes before its subscription and says nothing that matters here.
        while greeted && let Some(item) = reader.item()? {
            if let Item::Message(_) = item {
                return Ok(socket);
            }
        }
        let mut piece = [0; 512];
        match socket.read(&mut piece).await? {
            0 => return Err(ZmtpError::Closed),
            read => reader.push(&piece[..read]),
        }
    }
}

/// Batch `turn` stores a turn and removes the one on the other side of the ring.
fn batches() -> Vec<Vec<u8>> {
    let hashes = seeded(11, TURNS * TURN_BLOCKS);
    let turns: Vec<&[i64]> = hashes.chunks(TURN_BLOCKS).collect();
    let one = |turn: usize| {
        let mut out = Vec::new();
        let write = &mut out;
        // Writing to memory cannot fail.
        let _ = encode::write_array_len(write, 3);
        let _ = encode::write_f64(write, turn as f64);
        let _ = encode::write_array_len(write, 2);
        removal(write, turns[(turn + TURNS / 2) % TURNS]);
        store(write, turns[turn], turn as u64);
        let _ = encode::write_uint(write, 0);
        out
    };
    (0..TURNS).map(one).collect()
}

fn hashes(write: &mut Vec<u8>, hashes: &[i64]) {
    let _ = encode::write_str(write, "block_hashes");
    let _ = encode::write_array_len(write, hashes.len() as u32);
    for hash in hashes {
        let _ = encode::write_sint(write, *hash);
    }
}

fn removal(write: &mut Vec<u8>, blocks: &[i64]) {
    let _ = encode::write_map_len(write, 2);
    let _ = encode::write_str(write, "type");
    let _ = encode::write_str(write, "BlockRemoved");
    hashes(write, blocks);
}

fn store(write: &mut Vec<u8>, blocks: &[i64], seed: u64) {
    let _ = encode::write_map_len(write, 4);
    let _ = encode::write_str(write, "type");
    let _ = encode::write_str(write, "BlockStored");
    hashes(write, blocks);
    let _ = encode::write_str(write, "token_ids");
    let tokens = blocks.len() * BLOCK_TOKENS;
    let _ = encode::write_array_len(write, tokens as u32);
    for token in seeded(seed, tokens) {
        let _ = encode::write_uint(write, token.unsigned_abs() % VOCABULARY);
    }
    let _ = encode::write_str(write, "block_size");
    let _ = encode::write_uint(write, BLOCK_TOKENS as u64);
}
