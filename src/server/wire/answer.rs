//! The four answers, written straight to their bytes.
//!
//! A prefix answer is mostly the labels of its workers, so each label is encoded
//! once in its life and copied from then on. Field order within a message is
//! free in protobuf: a label's two fields stand together, the count follows.
//! Nothing here may run under the index's lock.

use bytes::BufMut;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use super::Answer;
use crate::arena::{Label, Labels, PackedHashes};
use crate::scan::PrefixMatch;
use crate::scan::lookup::{BlockMatches, TierBlocks, WorkerBlocks};

/// `ApplyExternalKvBatchResponse`: it has no fields.
pub(in crate::server) fn applied() -> Answer {
    Answer(Vec::new())
}

/// Bytes that one match of a prefix answer usually takes, for a first allocation.
const PREFIX_MATCH_BYTES: usize = 80;

/// `MatchExternalKvPrefixResponse` for `matches`, longest first.
pub(in crate::server) fn prefix_matches(
    matches: &[PrefixMatch],
    blocks_read: u32,
    labels: &Labels,
) -> Answer {
    let mut bytes = Vec::with_capacity((matches.len() + 1) * PREFIX_MATCH_BYTES);
    for found in matches {
        // Labels and matches are of the same moment, so every match has its label.
        if let Some(label) = labels.get(found.worker) {
            prefix_match(label.wire(prefix_label), found.blocks, &mut bytes);
        }
    }
    put_number(2, matches.first().map_or(0, |found| found.blocks).into(), &mut bytes);
    put_number(3, blocks_read.into(), &mut bytes);
    Answer(bytes)
}

/// What an `ExternalKvPrefixMatch` says of its worker: fields 1 and 3.
fn prefix_label(label: &Label) -> Box<[u8]> {
    prefix_names(label.address(), label.id()).into_boxed_slice()
}

fn prefix_names(address: &str, id: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text_len(1, address) + text_len(3, id));
    put_text(1, address, &mut bytes);
    put_text(3, id, &mut bytes);
    bytes
}

fn prefix_match(names: &[u8], blocks: u32, bytes: &mut Vec<u8>) {
    put_head(1, names.len() + number_len(2, blocks.into()), bytes);
    bytes.put_slice(names);
    put_number(2, blocks.into(), bytes);
}

/// `MatchExternalKvResponse` for `found` among `hashes`.
pub(in crate::server) fn block_matches(
    found: &BlockMatches,
    hashes: PackedHashes<'_>,
    labels: &Labels,
) -> Answer {
    let mut bytes = Vec::new();
    for worker in &found.workers {
        // Labels and matches are of the same moment, so every match has its label.
        if let Some(label) = labels.get(worker.worker) {
            worker_blocks(label.id(), label.address(), worker, &found.tokens, hashes, &mut bytes);
        }
    }
    Answer(bytes)
}

/// Field 1 of the answer: an `ExternalKvNodeMatch`.
fn worker_blocks(
    id: &str,
    address: &str,
    worker: &WorkerBlocks,
    tokens: &[u32],
    hashes: PackedHashes<'_>,
    bytes: &mut Vec<u8>,
) {
    let tiers: Vec<_> = worker.tiers.iter().map(|tier| (tier, TierLengths::of(tier, tokens))).collect();
    let tiers_len: usize = tiers.iter().map(|(_, lengths)| delimited_len(3, lengths.message)).sum();
    put_head(1, text_len(1, id) + text_len(2, address) + tiers_len, bytes);
    put_text(1, id, bytes);
    put_text(2, address, bytes);
    for (tier, lengths) in tiers {
        put_tier(tier, &lengths, tokens, hashes, bytes);
    }
}

/// Lengths inside a `TierHashes`, needed before its first byte is written.
struct TierLengths {
    hashes: usize,
    masks: usize,
    sizes: usize,
    message: usize,
}

impl TierLengths {
    fn of(tier: &TierBlocks, tokens: &[u32]) -> Self {
        let hashes = tier.positions.len() * size_of::<i64>();
        let masks = varints_len(tier.masks.iter().copied());
        let sizes = varints_len(sizes(tier, tokens));
        let message = number_len(1, tier_number(tier))
            + delimited_len(2, hashes)
            + delimited_len(3, masks)
            + delimited_len(4, sizes);
        TierLengths { hashes, masks, sizes, message }
    }
}

/// Field 3 of a worker: a `TierHashes`, its three lists aligned.
fn put_tier(
    tier: &TierBlocks,
    lengths: &TierLengths,
    tokens: &[u32],
    hashes: PackedHashes<'_>,
    bytes: &mut Vec<u8>,
) {
    bytes.reserve(delimited_len(3, lengths.message));
    put_head(3, lengths.message, bytes);
    put_number(1, tier_number(tier), bytes);
    put_head(2, lengths.hashes, bytes);
    for &position in &tier.positions {
        bytes.put_slice(&hashes.as_bytes()[position as usize]);
    }
    put_head(3, lengths.masks, bytes);
    for &mask in &tier.masks {
        encode_varint(mask.into(), bytes);
    }
    put_head(4, lengths.sizes, bytes);
    for size in sizes(tier, tokens) {
        encode_varint(size.into(), bytes);
    }
}

fn tier_number(tier: &TierBlocks) -> u64 {
    tier.tier as u64
}

/// Tokens of each of the tier's blocks.
fn sizes<'a>(tier: &'a TierBlocks, tokens: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
    tier.positions.iter().map(|&position| tokens[position as usize])
}

fn varints_len(values: impl Iterator<Item = u32>) -> usize {
    values.map(|value| encoded_len_varint(value.into())).sum()
}

/// `GetExternalKvHitCountsResponse` for the positions in `hashes` that have a count.
pub(in crate::server) fn hit_counts(counts: &[(u32, u64)], hashes: PackedHashes<'_>) -> Answer {
    let mut bytes = Vec::new();
    for &(position, total) in counts {
        let hash = hashes.as_bytes()[position as usize];
        put_head(1, key_len(1) + hash.len() + number_len(2, total), &mut bytes);
        encode_key(1, WireType::SixtyFourBit, &mut bytes);
        bytes.put_slice(&hash);
        put_number(2, total, &mut bytes);
    }
    Answer(bytes)
}

/// Key and length of a length-delimited field.
fn put_head(tag: u32, length: usize, bytes: &mut Vec<u8>) {
    encode_key(tag, WireType::LengthDelimited, bytes);
    encode_varint(length as u64, bytes);
}

/// A whole length-delimited field of `length` bytes.
fn delimited_len(tag: u32, length: usize) -> usize {
    key_len(tag) + encoded_len_varint(length as u64) + length
}

/// A string; an empty one is absent, as proto3 has it.
fn put_text(tag: u32, text: &str, bytes: &mut Vec<u8>) {
    if !text.is_empty() {
        put_head(tag, text.len(), bytes);
        bytes.put_slice(text.as_bytes());
    }
}

fn text_len(tag: u32, text: &str) -> usize {
    if text.is_empty() { 0 } else { delimited_len(tag, text.len()) }
}

/// A number; 0 is absent, as proto3 has it.
fn put_number(tag: u32, number: u64, bytes: &mut Vec<u8>) {
    if number != 0 {
        encode_key(tag, WireType::Varint, bytes);
        encode_varint(number, bytes);
    }
}

fn number_len(tag: u32, number: u64) -> usize {
    if number == 0 { 0 } else { key_len(tag) + encoded_len_varint(number) }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::arena::{Tier, WorkerId};
    use crate::pb;

    #[test]
    fn a_prefix_answer_is_what_clients_read() {
        let (address, id) = ("http://wörker:30000", "x".repeat(300));
        for blocks in [1, 127, 128, u32::MAX] {
            let mut bytes = Vec::new();
            prefix_match(&prefix_names(address, &id), blocks, &mut bytes);
            let read = pb::MatchExternalKvPrefixResponse::decode(&bytes[..]).expect("well formed");
            let expected = pb::ExternalKvPrefixMatch {
                worker_address: address.into(),
                matched_prefix_blocks: blocks,
                worker_id: id.clone(),
            };
            assert_eq!(read.matches, [expected]);
        }
        let Answer(miss) = prefix_matches(&[], 1, &Labels::default());
        assert_eq!(
            miss,
            pb::MatchExternalKvPrefixResponse { blocks_read: 1, ..Default::default() }.encode_to_vec()
        );
    }

    #[test]
    fn a_block_answer_is_byte_for_byte_what_prost_writes() {
        let hashes = [10_i64, -20, 30, 1 << 40];
        let tokens = [64, 0, 300, u32::MAX];
        let wire = PackedHashes::pack(&hashes);
        let wire = PackedHashes::new(&wire).expect("whole hashes");
        for address in ["", "http://w"] {
            let tier = |tier, positions: &[u32], masks: &[u32]| TierBlocks {
                tier,
                positions: positions.to_vec(),
                masks: masks.to_vec(),
            };
            let worker = WorkerBlocks {
                worker: WorkerId(0),
                tiers: vec![tier(Tier::Hbm, &[0, 1, 3], &[0, 0, 0]), tier(Tier::Ssd, &[1, 2], &[7, 1 << 31])],
            };
            let mut bytes = Vec::new();
            worker_blocks("w", address, &worker, &tokens, wire, &mut bytes);
            let rows = worker.tiers.iter().map(|row| pb::TierHashes {
                tier: row.tier.wire(),
                hashes: row.positions.iter().map(|&at| hashes[at as usize]).collect(),
                component_masks: row.masks.clone(),
                block_sizes: row.positions.iter().map(|&at| tokens[at as usize]).collect(),
            });
            let node = pb::ExternalKvNodeMatch {
                worker_id: "w".into(),
                address: address.into(),
                hashes_by_tier: rows.collect(),
            };
            assert_eq!(bytes, pb::MatchExternalKvResponse { matches: vec![node] }.encode_to_vec());
        }
    }

    #[test]
    fn hit_counts_are_what_clients_read() {
        let hashes = [5_i64, 0, -1];
        let wire = PackedHashes::pack(&hashes);
        let wire = PackedHashes::new(&wire).expect("whole hashes");
        let counts = [(0, 1), (1, 300), (2, u64::MAX)];
        let Answer(bytes) = hit_counts(&counts, wire);
        let read = pb::GetExternalKvHitCountsResponse::decode(&bytes[..]).expect("well formed");
        let entries =
            counts.map(|(at, total)| pb::HitCountEntry { hash: hashes[at as usize], hit_count_total: total });
        assert_eq!(read.entries, entries);
    }
}
