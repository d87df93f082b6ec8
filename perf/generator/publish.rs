//! An engine's publisher that never rests, to see what a bridge does with its time.
//!
//! Turns of conversations are stored and, half a ring later, removed again, so that the index keeps its
//! size. Batches are made beforehand and sent as fast as the subscriber reads them: where a ZeroMQ library's
//! socket would drop, this waits.

use std::error::Error;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rmp::encode;
use sgl_kv_indexer::bridge::zmtp::wire::{self, Item, Reader};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::workload::Seeded;

/// Blocks of a turn.
const TURN_BLOCKS: usize = 32;
/// Token ids of a block.
const BLOCK_TOKENS: usize = 64;
/// Turns of the ring; half of them are held.
const TURNS: usize = 2_048;
/// Size of a vocabulary.
const VOCABULARY: usize = 150_000;

/// Binds, waits for one subscriber, and floods it for so long or until it leaves.
pub(crate) async fn flood(address: &str, time: Duration) -> Result<(), Box<dyn Error>> {
    let batches = batches();
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let mut socket = shake_hands(listener.accept().await?.0).await?;
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
    let blocks = (sent * TURN_BLOCKS as u64) as f64 / seconds;
    println!(
        "{:.0} batches, {blocks:.0} blocks, {:.1} MB a second",
        sent as f64 / seconds,
        bytes as f64 / seconds / 1e6
    );
    Ok(())
}

/// Greets a subscriber and takes its subscription.
async fn shake_hands(mut socket: TcpStream) -> Result<TcpStream, Box<dyn Error>> {
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
            0 => return Err("the subscriber left".into()),
            read => reader.push(&piece[..read]),
        }
    }
}

/// Batch `turn` stores a turn and removes the one on the other side of the ring.
fn batches() -> Vec<Vec<u8>> {
    let mut seeded = Seeded::new(11);
    let turns: Vec<Vec<i64>> = (0..TURNS).map(|_| seeded.chain(TURN_BLOCKS)).collect();
    let one = |turn: usize| {
        let mut out = Vec::new();
        let write = &mut out;
        // Writing to memory cannot fail.
        let _ = encode::write_array_len(write, 3);
        let _ = encode::write_f64(write, turn as f64);
        let _ = encode::write_array_len(write, 2);
        removal(write, &turns[(turn + TURNS / 2) % TURNS]);
        store(write, &turns[turn], &mut Seeded::new(turn as u64));
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

fn store(write: &mut Vec<u8>, blocks: &[i64], seeded: &mut Seeded) {
    let _ = encode::write_map_len(write, 4);
    let _ = encode::write_str(write, "type");
    let _ = encode::write_str(write, "BlockStored");
    hashes(write, blocks);
    let _ = encode::write_str(write, "token_ids");
    let tokens = blocks.len() * BLOCK_TOKENS;
    let _ = encode::write_array_len(write, tokens as u32);
    for _ in 0..tokens {
        let _ = encode::write_uint(write, seeded.below(VOCABULARY) as u64);
    }
    let _ = encode::write_str(write, "block_size");
    let _ = encode::write_uint(write, BLOCK_TOKENS as u64);
}
