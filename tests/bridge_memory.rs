//! Input of any bytes: no panic, and memory within a small multiple of the input's size, as the allocator
//! counts it.
//!
//! Random bytes, and recordings in which bytes, lengths and whole pieces are changed, seeded, so that a
//! failure comes again. The same inputs are what `fuzz/` begins with; this bounded run needs no nightly compiler.

mod common;

use std::alloc::System;

use bytes::Bytes;
use common::capture::{Capture, names};
use sgl_kv_indexer::bridge::CHANGE_BYTES_RATIO;
use sgl_kv_indexer::bridge::chunker::Chunker;
use sgl_kv_indexer::bridge::event::{Decoder, EVENT_BYTES_RATIO, Event};
use sgl_kv_indexer::bridge::stream::{Rules, Stream};
use sgl_kv_indexer::bridge::zmtp::wire::{self, Item, Reader};
use sgl_kv_indexer::pb::TierType as Tier;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Inputs of each kind.
const ROUNDS: usize = 20_000;

/// A small generator with a fixed start.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// Changes an input in one to four places.
    fn mutate(&mut self, input: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(input.len());
            match self.below(5) {
                0 if !input.is_empty() => input[at] = self.next() as u8,
                1 => input.truncate(at),
                // Heads of lists, maps, strings and extensions that declare four billion.
                2 => {
                    let head = [0xdd, 0xdf, 0xdb, 0xc6, 0xc9][self.below(5)];
                    input.splice(at..at, [head, 0xff, 0xff, 0xff, 0xff]);
                }
                // A piece comes twice.
                3 => {
                    let piece = input[at..at + self.below(input.len() - at)].to_vec();
                    input.splice(at..at, piece);
                }
                _ => input.extend([0x91; 64]),
            }
        }
    }
}

/// Bytes that `work` allocates: the least of three runs, as the test's harness may allocate beside it.
fn allocated(mut work: impl FnMut()) -> usize {
    let count = |work: &mut dyn FnMut()| {
        let region = Region::new(ALLOCATOR);
        work();
        region.change().bytes_allocated
    };
    (0..3).map(|_| count(&mut work)).min().unwrap_or_default()
}

/// Decodes a payload and reads all of its hashes, within the decoder's bound.
fn check_payload(payload: &[u8]) {
    let bytes = allocated(|| {
        let mut decoder = Decoder::default();
        let Ok(batch) = decoder.decode(payload) else { return };
        for event in batch.events {
            assert_eq!(batch.hashes(event).count(), event.hashes as usize);
        }
    });
    // A list that grows may have room for as much again, and begins with room for four.
    let bound = 2 * EVENT_BYTES_RATIO * payload.len() + 4 * size_of::<Event>();
    assert!(bytes <= bound, "{bytes} bytes for {}: {payload:02x?}", payload.len());
}

/// Makes a payload into waiting changes, within what a bridge thinks that they take.
fn check_changes(payload: &[u8]) {
    let rules = Rules { clear_tiers: vec![Tier::TierHbm, Tier::TierDram, Tier::TierSsd], ..Rules::default() };
    let (mut stream, mut changes) = (Stream::new(rules), Chunker::default());
    let frames = [Bytes::new(), vec![0; 8].into(), payload.to_vec().into()];
    stream.message(&frames, &mut changes);
    let bytes = changes.bytes();
    assert!(bytes <= CHANGE_BYTES_RATIO * payload.len(), "{bytes} bytes for {}", payload.len());
}

/// Reads bytes as a peer's; what is kept between two pieces is the input not handed on yet, and little more.
fn check_wire(input: &[u8]) {
    let kept = |work: &mut dyn FnMut()| {
        let region = Region::new(ALLOCATOR);
        work();
        let change = region.change();
        change.bytes_allocated as isize - change.bytes_deallocated as isize
    };
    let mut reader = Reader::default();
    let mut held = 0_isize;
    for piece in input.chunks(100) {
        held += kept(&mut || {
            reader.push(piece);
            while let Ok(Some(item)) = reader.item() {
                if let Item::Command(body) = item {
                    let _ = wire::command(&body);
                }
            }
        });
    }
    let bound = 4 * input.len() + 16 * 1_024;
    assert!(held.unsigned_abs() <= bound, "{held} bytes for {}", input.len());
    let mut reader = Reader::default();
    reader.push(input);
    let _ = reader.greeting();
}

#[test]
fn memory_is_within_the_size_of_any_input() {
    let recorded: Vec<Vec<u8>> = names()
        .iter()
        .flat_map(|name| Capture::read(name).payloads().map(|raw| raw.to_vec()).collect::<Vec<_>>())
        .filter(|payload| payload.len() < 20_000)
        .collect();
    assert!(recorded.len() > 1_000, "{} payloads", recorded.len());
    recorded.iter().for_each(|payload| check_payload(payload));

    let mut seeded = Seeded(1);
    for round in 0..ROUNDS {
        let length = seeded.below(400);
        let mut input = seeded.bytes(length);
        if round % 2 == 0 && input.len() > 12 {
            // The head of a batch, without which nearly no random bytes are looked at.
            input.splice(0..12, [0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdc, 0]);
        }
        check_payload(&input);
        check_changes(&input);
        check_wire(&input);
        let mut input = recorded[seeded.below(recorded.len())].clone();
        seeded.mutate(&mut input);
        check_payload(&input);
        check_changes(&input);
        check_wire(&input);
    }
    // The densest payloads: the shortest events that are kept, and nothing but nesting.
    let clear = b"\x91\xb0AllBlocksCleared";
    let dense = [&[0x92, 0xc0, 0xdc, 0xff, 0xff][..], &clear.repeat(65_535)].concat();
    check_payload(&dense);
    check_changes(&dense);
    check_payload(&[&[0x92, 0xc0][..], &[0x91; 1_000_000]].concat());
}
