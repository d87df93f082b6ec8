//! Every way to write the same message, and some that are not messages.

use sgl_kv_indexer::pb;
use tonic::Code;

use crate::raw::*;
use crate::served::*;

const APPLY: &str = "ApplyExternalKvBatch";
const MATCH: &str = "MatchExternalKv";
const PREFIX: &str = "MatchExternalKvPrefix";
const COUNTS: &str = "GetExternalKvHitCounts";

const HASHES: [i64; 6] = [1, -2, i64::MIN, i64::MAX, 0, 0x0102_0304_0506_0708];

/// The hashes, as field `field`, in every encoding that a reader must take.
fn encodings(field: u64) -> Vec<(&'static str, Vec<u8>)> {
    let all = &HASHES[..];
    let (head, tail) = all.split_at(2);
    let noise = unknown(77);
    vec![
        ("packed", packed(field, all)),
        ("unpacked", unpacked(field, all)),
        ("split", [packed(field, head), packed(field, tail)].concat()),
        ("split with empty chunks", [packed(field, &[]), packed(field, all), packed(field, &[])].concat()),
        ("one chunk each", all.iter().flat_map(|hash| packed(field, &[*hash])).collect()),
        ("packed, then unpacked", [packed(field, head), unpacked(field, tail)].concat()),
        ("unpacked, then packed", [unpacked(field, head), packed(field, tail)].concat()),
        ("packed between unknown fields", [noise.clone(), packed(field, all), noise.clone()].concat()),
        ("split by unknown fields", [unpacked(field, head), noise, packed(field, tail)].concat()),
    ]
}

/// A batch of `w` at `http://w` with one action, and whatever else `rest` holds.
fn apply_bytes(action: &[u8], rest: &[u8]) -> Vec<u8> {
    [chunk(1, b"w"), chunk(3, action), chunk(4, b"http://w"), rest.to_vec()].concat()
}

#[tokio::test]
async fn hashes_of_an_action_are_read_in_every_encoding() {
    for (what, hashes) in encodings(3) {
        let mut served = Served::start().await;
        let action = [number(1, REPORT as u64), hashes.clone(), number(2, HBM as u64)].concat();
        let answer: Result<pb::ApplyExternalKvBatchResponse, _> =
            call(&served.channel, APPLY, apply_bytes(&action, &[])).await;
        answer.expect(what);
        assert_eq!(served.prefix(&HASHES, 0).await.best_prefix_blocks, 6, "{what}");

        let action = [hashes, number(2, HBM as u64), number(1, REVOKE as u64)].concat();
        let answer: Result<pb::ApplyExternalKvBatchResponse, _> =
            call(&served.channel, APPLY, apply_bytes(&action, &[])).await;
        answer.expect(what);
        assert_eq!(served.held(&HASHES, false).await, [], "{what}");
    }
}

#[tokio::test]
async fn hashes_of_a_query_are_read_in_every_encoding() {
    let mut served = Served::with(&[batch("w", &[report(HBM, &HASHES, &[], &[])])]).await;
    for (round, (what, hashes)) in (1..).zip(encodings(1)) {
        let channel = &served.channel;
        let answer: pb::MatchExternalKvPrefixResponse =
            call(channel, PREFIX, hashes.clone()).await.expect(what);
        assert_eq!(prefixes(&answer), "w=6", "{what}");
        assert_eq!(answer.blocks_read, 6, "{what}");
        let cut = [hashes.clone(), number(2, 4)].concat();
        let answer: pb::MatchExternalKvPrefixResponse = call(channel, PREFIX, cut).await.expect(what);
        assert_eq!(prefixes(&answer), "w=4", "{what}");

        let counted = [number(2, 1), hashes.clone()].concat();
        let answer: pb::MatchExternalKvResponse = call(channel, MATCH, counted).await.expect(what);
        assert_eq!(answer.matches, served.held(&HASHES, false).await, "{what}");
        let answer: pb::GetExternalKvHitCountsResponse =
            call(&served.channel, COUNTS, hashes).await.expect(what);
        let expected = HASHES.map(|hash| pb::HitCountEntry { hash, hit_count_total: round });
        assert_eq!(answer.entries, expected, "{what}");
    }
}

#[tokio::test]
async fn metadata_is_read_packed_and_not() {
    let packed_masks = packed_numbers(4, &[1, 300, 0xffff_ffff]);
    let plain_masks = [number(4, 1), number(4, 300), number(4, 0xffff_ffff)].concat();
    let mixed_masks = [packed_numbers(4, &[1]), number(4, 300), packed_numbers(4, &[0xffff_ffff])].concat();
    // Two bytes for a number that one would hold.
    let long_masks = [chunk(4, b"\x81\x00\xac\x02"), number(4, 0xffff_ffff)].concat();
    let sizes = [packed_numbers(5, &[16, 0]), number(5, 48)].concat();
    for masks in [packed_masks, plain_masks, mixed_masks, long_masks] {
        let mut served = Served::start().await;
        let action =
            [masks, number(2, DRAM as u64), number(1, REPORT as u64), packed(3, &[1, 2, 3]), sizes.clone()]
                .concat();
        let answer: Result<pb::ApplyExternalKvBatchResponse, _> =
            call(&served.channel, APPLY, apply_bytes(&action, &[])).await;
        answer.expect("legal");
        let held = served.held(&[1, 2, 3], false).await;
        assert_eq!(text(&held), "w@http://w DRAM[1/1/16 2/300/0 3/4294967295/48]");
    }
}

#[tokio::test]
async fn single_fields_may_come_twice_and_unknown_ones_anywhere() {
    let mut served = Served::start().await;
    // The last of a single field counts; a message's occurrences are joined.
    let action = [
        number(1, CLEAR as u64),
        number(2, SSD as u64),
        unknown(6),
        packed(3, &[1, 2]),
        packed_numbers(4, &[FULL.into(), FULL.into()]),
        number(1, REPORT as u64),
        number(2, HBM as u64),
    ]
    .concat();
    let spec = [number(1, 1), number(2, FULL.into()), unknown(9)].concat();
    let more_of_it = number(4, 1 << HBM);
    let message = [
        unknown(5),
        chunk(1, b"someone"),
        chunk(6, spec),
        unknown(7),
        chunk(3, action),
        chunk(4, b"http://elsewhere"),
        chunk(4, b"http://w"),
        unknown(8),
        chunk(6, more_of_it),
        chunk(1, b"w"),
        unknown(536_870_911),
    ]
    .concat();
    let answer: Result<pb::ApplyExternalKvBatchResponse, _> = call(&served.channel, APPLY, message).await;
    answer.expect("legal");
    assert_eq!(text(&served.held(&[1, 2], false).await), "w@http://w HBM[1/1/0 2/1/0]");
    assert_eq!(prefixes(&served.prefix(&[1, 2], 0).await), "w=2");
}

#[tokio::test]
async fn malformed_messages_are_refused_and_change_nothing() {
    let mut served = Served::with(&[batch("w", &[report(HBM, &[1], &[], &[])])]).await;
    let before = served.snapshot(&[1, 2]).await;
    let good = packed(1, &[1]);
    for ragged in [1, 4, 7, 9, 15] {
        for hashes in [chunk(1, vec![0; ragged]), [good.clone(), chunk(1, vec![0; ragged])].concat()] {
            for method in [PREFIX, MATCH, COUNTS] {
                let answer: Result<pb::MatchExternalKvResponse, _> =
                    call(&served.channel, method, hashes.clone()).await;
                let code = answer.map_or_else(|status| status.code(), |_| Code::Ok);
                assert_eq!(code, Code::InvalidArgument, "{method} with {ragged} bytes");
            }
        }
        for type_and_tier in [(REPORT, HBM), (REVOKE, HBM), (CLEAR, HBM)] {
            let (kind, tier) = type_and_tier;
            let head = [number(1, kind as u64), number(2, tier as u64), packed(3, &[1, 2])].concat();
            let legal = chunk(3, [number(1, CLEAR as u64), number(2, HBM as u64)].concat());
            let action = [head, chunk(3, vec![0; ragged])].concat();
            let message = [legal, apply_bytes(&action, &[])].concat();
            let answer: Result<pb::ApplyExternalKvBatchResponse, _> =
                call(&served.channel, APPLY, message).await;
            let code = answer.map_or_else(|status| status.code(), |_| Code::Ok);
            assert_eq!(code, Code::InvalidArgument, "{type_and_tier:?} with {ragged} bytes");
        }
    }
    assert_eq!(served.snapshot(&[1, 2]).await, before);
}
