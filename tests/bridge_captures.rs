//! The decoder against streams of the engines' own publishers.

mod common;

use std::collections::BTreeMap;

use common::capture::{Capture, State, digest, names, state_of, unhex};
use proptest::prelude::*;
use sgl_kv_indexer::bridge::chunker::Chunker;
use sgl_kv_indexer::bridge::event::{
    BatchError, Change, Decoder, EVENT_BYTES_RATIO, Event, EventError, GroupKind,
};
use sgl_kv_indexer::bridge::stream::{Rules, Stream};
use sgl_kv_indexer::pb::{ExternalKvActionType as Type, TierType as Tier};

/// Placements by tier and group: a set, as the recordings read the events.
#[derive(Debug, Default)]
struct Reducer {
    held: BTreeMap<(Tier, Option<u32>, i64), u32>,
    counts: BTreeMap<&'static str, u64>,
}

impl Reducer {
    fn count(&mut self, name: &'static str, added: u64) {
        *self.counts.entry(name).or_default() += added;
    }

    fn apply(&mut self, event: &Event, hashes: impl Iterator<Item = i64>) {
        let hashes: Vec<i64> = hashes.collect();
        self.count("events", 1);
        match event.change {
            Change::Stored { tier, mask, .. } => {
                self.count("stored", 1);
                self.count("stored_hashes", hashes.len() as u64);
                for hash in hashes {
                    if self.held.insert((tier, event.group, hash), mask).is_some() {
                        self.count("dup_store", 1);
                    }
                }
            }
            Change::Removed { tier } => {
                self.count("removed", 1);
                self.count("removed_hashes", hashes.len() as u64);
                for hash in hashes {
                    if self.held.remove(&(tier, event.group, hash)).is_none() {
                        self.count("absent_remove", 1);
                    }
                }
            }
            Change::Cleared => {
                self.count("cleared", 1);
                self.held.clear();
            }
        }
    }

    /// The state in the recordings' words. The decoder keeps tiers, not media, so
    /// the recording says which medium each tier's blocks came in.
    fn state(&self, hash_text: &dyn Fn(i64) -> String) -> State {
        let mut state = State::new();
        for (tier, group, hash) in self.held.keys() {
            let medium = match tier {
                Tier::TierHbm => "GPU",
                Tier::TierDram => "CPU_PINNED",
                _ => "DISK",
            };
            let place = group.map_or_else(|| medium.to_owned(), |group| format!("{medium}/{group}"));
            state.entry(place).or_default().insert(hash_text(*hash));
        }
        state
    }
}

/// How a capture's expectations write a hash: signed, unsigned, or the whole byte string.
fn hash_text(capture: &Capture, expected: &State) -> impl Fn(i64) -> String {
    let signed = !capture.name.starts_with("vllm");
    let whole: BTreeMap<i64, String> = expected
        .values()
        .flatten()
        .filter_map(|hash| hash.strip_prefix('x'))
        .map(|hex| {
            let tail = u64::from_str_radix(&hex[hex.len() - 16..], 16).expect("hex");
            (tail.cast_signed(), format!("x{hex}"))
        })
        .collect();
    move |hash| match whole.get(&hash) {
        Some(whole) => whole.clone(),
        None if signed => hash.to_string(),
        None => hash.cast_unsigned().to_string(),
    }
}

fn reduce(capture: &Capture, stream: &str) -> Reducer {
    let mut decoder = Decoder::default();
    let mut reducer = Reducer::default();
    for message in capture.received(stream) {
        let payload = message.frames.last().expect("payload");
        let batch = decoder.decode(payload).expect("a batch");
        assert_eq!(batch.left_out.undecodable, 0, "{} {stream}", capture.name);
        reducer.count("batches", 1);
        for event in batch.events {
            reducer.apply(event, batch.hashes(event));
        }
    }
    reducer
}

#[test]
fn every_recorded_stream_reduces_to_its_recorded_state() {
    let mut checked = 0;
    for name in names() {
        let capture = Capture::read(&name);
        // These invent media that are no tier, which the recordings' reducer keeps.
        if name.ends_with("media-classes") {
            continue;
        }
        for (stream, expected) in capture.streams() {
            let reducer = reduce(&capture, &stream);
            let state = state_of(&expected);
            let found = reducer.state(&hash_text(&capture, &state));
            assert_eq!(found, state, "{name} {stream}");
            assert_eq!(digest(&found), expected["final_digest"].as_str().expect("digest"), "{name} {stream}");
            for (counter, count) in expected["counters"].as_object().expect("counters") {
                let found = reducer.counts.get(counter.as_str()).copied().unwrap_or(0);
                assert_eq!(Some(found), count.as_u64(), "{name} {stream} {counter}");
            }
            if let Some(masks) = expected["component_masks"].as_object() {
                let found: BTreeMap<String, u32> =
                    reducer.held.iter().map(|((_, _, hash), mask)| (hash.to_string(), *mask)).collect();
                let recorded =
                    masks.iter().map(|(hash, mask)| (hash.clone(), mask.as_u64().expect("mask") as u32));
                assert_eq!(found, recorded.collect(), "{name} {stream}");
            }
            checked += 1;
        }
    }
    assert!(checked >= 17, "{checked} streams");
}

#[test]
fn media_are_mapped_or_counted_and_never_guessed() {
    let rows = [
        (
            "sglang-media-classes",
            "w0/dp2",
            vec![(Tier::TierHbm, 15), (Tier::TierDram, 2), (Tier::TierSsd, 5)],
            true,
        ),
        ("vllm-media-classes", "w0/dp3", vec![(Tier::TierHbm, 3)], false),
    ];
    for (name, stream, held, has_unknown) in rows {
        let capture = Capture::read(name);
        let reducer = reduce(&capture, stream);
        for tier in [Tier::TierHbm, Tier::TierDram, Tier::TierSsd] {
            let found = reducer.held.keys().filter(|(at, ..)| *at == tier).count();
            let expected = held.iter().find(|(at, _)| *at == tier).map_or(0, |(_, count)| *count);
            assert_eq!(found, expected, "{name} {tier:?}");
        }
        let mut decoder = Decoder::default();
        let unknown: u64 = capture
            .received(stream)
            .map(|message| {
                let payload = message.frames.last().expect("payload");
                decoder.decode(payload).expect("a batch").left_out.unknown_media
            })
            .sum();
        assert_eq!(unknown > 0, has_unknown, "{name}");
    }
}

#[test]
fn the_golden_payloads_decode() {
    let payload = unhex(
        "93cb405edd2f1a9fbe779397ab426c6f636b53746f72656492cf0000011f71fb04cbd2c521974f2a940a141e280407a3475055\
         93ac426c6f636b52656d6f7665649264ccc8a44449534b91b0416c6c426c6f636b73436c656172656402"
            .replace(' ', "")
            .as_str(),
    );
    let mut decoder = Decoder::default();
    let batch = decoder.decode(&payload).expect("golden");
    assert_eq!(batch.rank, Some(2));
    let seen: Vec<(Change, Vec<i64>)> =
        batch.events.iter().map(|event| (event.change, batch.hashes(event).collect())).collect();
    assert_eq!(
        seen,
        [
            (
                Change::Stored { tier: Tier::TierHbm, mask: 0, block_tokens: 4 },
                vec![1_234_567_890_123, -987_654_321]
            ),
            (Change::Removed { tier: Tier::TierSsd }, vec![100, 200]),
            (Change::Cleared, vec![]),
        ]
    );
    let payload = unhex("93cb3ff80000000000009197ab426c6f636b53746f726564916fc092920a1492141e02c0a347505503");
    let batch = decoder.decode(&payload).expect("golden");
    assert_eq!(batch.rank, Some(3));
    assert_eq!(batch.events[0].change, Change::Stored { tier: Tier::TierHbm, mask: 0, block_tokens: 2 });
    assert_eq!(batch.hashes(&batch.events[0]).collect::<Vec<_>>(), [111]);
}

/// What one message of `synth-malformed` should do, by its label.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// Stored, with this mask at HBM.
    Held(Vec<(i64, u32)>),
    /// Removed from HBM.
    Gone(Vec<i64>),
    /// Nothing, with this many messages, batches, events, tags and media counted as such.
    Skipped([u64; 5]),
}

fn malformed(label: &str) -> Outcome {
    let held = |hashes: &[(i64, u32)]| Outcome::Held(hashes.to_vec());
    let foreign = Outcome::Skipped([1, 0, 0, 0, 0]);
    let batch = Outcome::Skipped([0, 1, 0, 0, 0]);
    let event = Outcome::Skipped([0, 0, 1, 0, 0]);
    match label {
        "good" => held(&[(1, 0)]),
        "two frames [seq, payload]" => held(&[(2, 0)]),
        "one frame" | "four frames" | "seq of 4 bytes" | "seq of all ones" | "topic longer than asked" => {
            foreign
        }
        "empty payload" | "truncated payload" | "payload is a map" | "events not a list"
        | "huge array length" | "deep nesting" => batch,
        "trailing bytes" => held(&[(1, 0)]),
        "one bad event among good" => held(&[(10, 0), (11, 0)]),
        "unknown event type" => held(&[(12, 0)]),
        "unknown extra key" => held(&[(13, 0)]),
        "keys in another order" => held(&[(14, 0)]),
        "batch with extra fields" => held(&[(15, 0)]),
        "batch of two fields" => held(&[(16, 0)]),
        "unknown medium" => Outcome::Skipped([0, 0, 0, 0, 1]),
        "hash over i64 (uint64)" => held(&[(-9_223_372_036_854_775_803, 0)]),
        "hash as bytes32" => held(&[(0x1819_1a1b_1c1d_1e1f, 0)]),
        "hash as string" | "hash as float" | "ext type" => event,
        "array event, 7 slots" => held(&[(20, 0)]),
        "array event, 6 slots (0.5.6)" => held(&[(21, 0)]),
        "array event, 8th slot list" => held(&[(22, 3)]),
        "array event, 8th slot map" => held(&[(23, 0)]),
        "array event, 8th slot string" => held(&[(24, 0)]),
        "array event, 8th slot nil" => held(&[(25, 0)]),
        "removed, 2 slots (0.5.6)" => Outcome::Gone(vec![21]),
        "component_types empty list" => Outcome::Gone(vec![22]),
        "component_types unknown label" => held(&[(26, 1)]),
        "component_type singular" => held(&[(27, 0)]),
        "seq repeats" => Outcome::Skipped([0; 5]),
        "seq jumps" => held(&[(30, 0)]),
        "seq goes back to 0" => held(&[(31, 0)]),
        "nested bigram tokens" => held(&[(32, 0)]),
        other => panic!("a label with no outcome: {other}"),
    }
}

#[test]
fn malformed_messages_do_what_their_labels_want() {
    let capture = Capture::read("synth-malformed");
    let mut stream = Stream::new(Rules {
        topic: "kv-events".to_owned(),
        clear_tiers: vec![Tier::TierHbm],
        ..Rules::default()
    });
    let mut changes = Chunker::default();
    for message in &capture.messages {
        let before = stream.health().clone();
        stream.message(&message.frames, &mut changes);
        let after = stream.health();
        let (mut held, mut gone) = (Vec::new(), Vec::new());
        for action in std::iter::from_fn(|| changes.pop()).flatten() {
            let mask = |index| action.component_masks.get(index).copied().unwrap_or(0);
            match action.r#type() {
                Type::ActionReport => {
                    held.extend(action.hashes.iter().enumerate().map(|(index, hash)| (*hash, mask(index))));
                }
                Type::ActionRevoke => gone.extend(action.hashes.iter().copied()),
                _ => {}
            }
        }
        let outcome = if !held.is_empty() {
            Outcome::Held(held)
        } else if !gone.is_empty() {
            Outcome::Gone(gone)
        } else {
            Outcome::Skipped([
                after.foreign_messages - before.foreign_messages,
                after.undecodable_batches - before.undecodable_batches,
                after.undecodable_events - before.undecodable_events,
                after.unknown_tags - before.unknown_tags,
                after.unknown_media - before.unknown_media,
            ])
        };
        assert_eq!(outcome, malformed(&message.label), "{}", message.label);
    }
    let health = stream.health();
    assert_eq!((health.repeats, health.gaps, health.missing_batches, health.restarts), (1, 1, 9, 1));
    assert_eq!((health.unknown_tags, health.unknown_components), (1, 1));
    // The publisher began anew with a clear, so nothing that was lost before matters.
    assert_eq!(health.incomplete, None);
}

#[test]
fn a_lost_event_is_named_and_its_siblings_kept() {
    let rows: &[(&str, Result<usize, EventError>)] = &[
        // An array of a removal without hashes, then a clear.
        (
            "92 00 92 91ac426c6f636b52656d6f766564 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::Hashes),
        ),
        // A byte string of 7 bytes.
        (
            "92 00 92 92ac426c6f636b52656d6f766564 91c40701020304050607 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::Hashes),
        ),
        // nil, and an array led by a number.
        ("92 00 92 c0 91b0416c6c426c6f636b73436c6561726564", Err(EventError::Untagged)),
        ("92 00 92 920102 91b0416c6c426c6f636b73436c6561726564", Err(EventError::Untagged)),
        // A medium that is a number.
        (
            "92 00 92 93ac426c6f636b52656d6f766564910105 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::Medium),
        ),
        // A group that is a string.
        (
            "92 00 92 94ac426c6f636b52656d6f7665649101c0a131 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::Group),
        ),
        // A block size that is negative.
        (
            "92 00 92 95ab426c6f636b53746f7265649101c090ff 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::BlockSize),
        ),
        // Components that hold a number.
        (
            "92 00 92 98ab426c6f636b53746f7265649101c09004c0c09101 91b0416c6c426c6f636b73436c6561726564",
            Err(EventError::Components),
        ),
        // A store of no hashes does nothing.
        ("92 00 92 95ab426c6f636b53746f72656490c09004 91b0416c6c426c6f636b73436c6561726564", Ok(1)),
    ];
    let mut decoder = Decoder::default();
    for (hex, expected) in rows {
        let payload = unhex(&hex.replace(' ', ""));
        let batch = decoder.decode(&payload).expect(hex);
        assert_eq!(batch.events.last().map(|event| event.change), Some(Change::Cleared), "{hex}");
        let found = batch.left_out.first_error.map_or(Ok(batch.events.len()), Err);
        assert_eq!(found, *expected, "{hex}");
    }
    assert_eq!(decoder.decode(&[]).expect_err("empty"), BatchError::Malformed);
    assert_eq!(decoder.decode(&[0x91, 0x00]).expect_err("one field"), BatchError::Shape);
}

#[test]
fn cache_groups_are_of_the_kinds_that_vllm_names() {
    let rows = [
        ("full_attention", GroupKind::Full),
        ("mla_attention", GroupKind::Full),
        ("sink_full_attention", GroupKind::Full),
        ("sliding_window", GroupKind::SlidingWindow),
        ("sliding_window_mla", GroupKind::SlidingWindow),
        ("mamba", GroupKind::Mamba),
        ("chunked_local_attention", GroupKind::Other),
        ("encoder_only_attention", GroupKind::Other),
        ("cross_attention", GroupKind::Other),
        ("unknown", GroupKind::Other),
    ];
    let mut decoder = Decoder::default();
    for (name, kind) in rows {
        // [0, [["BlockStored", [7], nil, [], 16, nil, "GPU", nil, nil, 1, NAME]]]
        let mut payload = unhex("9200919bab426c6f636b53746f7265649107c09010c0a3475055c0c001").to_vec();
        rmp::encode::write_str(&mut payload, name).expect("to memory");
        let batch = decoder.decode(&payload).expect("a batch");
        let found: Vec<_> = batch.events.iter().map(|event| (event.group, event.kind)).collect();
        assert_eq!(found, [(Some(1), Some(kind))], "{name}");
        let uncarried = u64::from(kind == GroupKind::Other);
        assert_eq!(batch.left_out.unknown_groups, uncarried, "{name}");
    }
}

fn check_bounds(payload: &[u8]) {
    let mut decoder = Decoder::default();
    let Ok(batch) = decoder.decode(payload) else { return };
    assert!(size_of_val(batch.events) <= EVENT_BYTES_RATIO * payload.len());
    let hashes: usize = batch.events.iter().map(|event| batch.hashes(event).count()).sum();
    assert!(hashes <= payload.len());
    for event in batch.events {
        assert_eq!(batch.hashes(event).count(), event.hashes as usize);
    }
}

fn recorded_payloads() -> Vec<Vec<u8>> {
    let captures = ["sglang-media-classes", "vllm-media-classes", "synth-malformed", "sglang-old-0.5.19"];
    captures
        .iter()
        .flat_map(|name| Capture::read(name).payloads().map(|raw| raw.to_vec()).collect::<Vec<_>>())
        .collect()
}

proptest! {
    #[test]
    fn random_bytes_never_panic(payload in prop::collection::vec(any::<u8>(), 0..400)) {
        check_bounds(&payload);
    }

    #[test]
    fn mutated_recordings_never_panic(
        pick in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        whether_cut in any::<bool>(),
    ) {
        static PAYLOADS: std::sync::LazyLock<Vec<Vec<u8>>> = std::sync::LazyLock::new(recorded_payloads);
        let mut payload = pick.get(&PAYLOADS).clone();
        if !payload.is_empty() {
            for (at, byte) in &changes {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            if whether_cut {
                payload.truncate(cut.index(payload.len()));
            }
        }
        check_bounds(&payload);
    }
}
