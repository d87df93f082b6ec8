//! What a stream makes of lost, repeated and repaired batches and of publishers that begin anew.

mod common;

use std::collections::BTreeMap;

use bytes::Bytes;
use common::capture::{Capture, State, state_of};
use proptest::prelude::*;
use sgl_kv_indexer::bridge::chunker::Chunker;
use sgl_kv_indexer::bridge::copies::Reading;
use sgl_kv_indexer::bridge::follow::{ATTEMPTS_MAX, Batch, Follower, Step};
use sgl_kv_indexer::bridge::health::Incomplete;
use sgl_kv_indexer::bridge::stream::{Rules, Stream};
use sgl_kv_indexer::pb::{ExternalKvAction, ExternalKvActionType as Type, TierType as Tier};

/// What a server holds at HBM, with masks.
#[derive(Debug, Default)]
struct Held {
    blocks: BTreeMap<i64, u32>,
    clears: u64,
}

impl Held {
    fn take(&mut self, changes: &mut Chunker) {
        std::iter::from_fn(|| changes.pop()).flatten().for_each(|action| self.apply(&action));
    }

    fn apply(&mut self, action: &ExternalKvAction) {
        if action.tier() != Tier::TierHbm {
            return;
        }
        let masks = action.component_masks.iter().copied().chain(std::iter::repeat(0));
        match action.r#type() {
            Type::ActionReport => self.blocks.extend(action.hashes.iter().copied().zip(masks)),
            Type::ActionRevoke => self.blocks.retain(|hash, _| !action.hashes.contains(hash)),
            _ => {
                self.blocks.clear();
                self.clears += 1;
            }
        }
    }

    fn state(&self) -> State {
        State::from([("GPU".to_owned(), self.blocks.keys().map(i64::to_string).collect())])
    }
}

fn rules() -> Rules {
    Rules { clear_tiers: vec![Tier::TierHbm], ..Rules::default() }
}

#[test]
fn a_restart_clears_once_and_leaves_the_last_life_alone() {
    for (name, right) in [("sglang-restart", "streams"), ("sglang-restart-idle", "right_state")] {
        let capture = Capture::read(name);
        let state = match right {
            "right_state" => state_of(&serde_json::json!({ "final_state": capture.expected[right] })),
            _ => state_of(&capture.streams()[0].1),
        };
        let lives = capture.expected["messages_after_each_life"].as_array().expect("lives");
        let ends: Vec<u64> = lives.iter().map(|end| end.as_u64().expect("count")).collect();
        // A lost connection shows a restart, and without one numbers and times do.
        for told in [true, false] {
            let (mut stream, mut changes, mut held) =
                (Stream::new(rules()), Chunker::default(), Held::default());
            stream.connected();
            for (index, message) in capture.messages.iter().enumerate() {
                if told && ends.contains(&(index as u64)) {
                    stream.disconnected();
                    stream.connected();
                }
                stream.message(&message.frames, &mut changes);
            }
            held.take(&mut changes);
            assert_eq!(held.state(), state, "{name} {told}");
            let health = stream.health();
            assert_eq!((health.restarts, health.gaps, health.repeats), (2, 0, 0), "{name} {told}");
            assert!(held.clears >= health.restarts, "{name} {told}");
            let why = health.incomplete.map(|(_, why)| why);
            let expected = (right == "right_state").then_some(Incomplete::JoinedLate);
            assert_eq!(why, expected, "{name} {told}");
        }
    }
}

#[test]
fn a_late_subscriber_is_repaired_by_the_recorded_replay() {
    let capture = Capture::read("sglang-replay");
    let full: Vec<_> = capture.received("full").collect();
    let (mut stream, mut changes, mut held) =
        (Stream::new(Rules { replays: true, ..rules() }), Chunker::default(), Held::default());
    stream.connected();
    assert_eq!(stream.question(), Some(0));
    // Live batches are held until the replay has given what was before them.
    for message in capture.received("late") {
        stream.message(&message.frames, &mut changes);
    }
    assert!(changes.is_empty());
    for message in &full[..60] {
        stream.replayed(replayed(&message.frames), &mut changes);
    }
    stream.replay_ended(&mut changes);
    held.take(&mut changes);
    let streams = capture.streams();
    let (_, expected) = streams.iter().find(|(name, _)| name == "full").expect("full");
    assert_eq!(held.state(), state_of(expected));
    let health = stream.health();
    assert_eq!((health.batches, health.repaired_batches, health.incomplete), (140, 60, None));
    assert!(!stream.repairing());
}

fn replayed(frames: &[Bytes]) -> Batch {
    let [.., sequence, payload] = frames else { panic!("frames") };
    let sequence = u64::from_be_bytes(sequence[..].try_into().expect("8 bytes"));
    Batch { sequence, time: sgl_kv_indexer::bridge::event::time_of(payload), payload: payload.clone() }
}

#[test]
fn copies_are_counted_as_the_engine_holds_them() {
    let engine = |capture: &Capture| -> BTreeMap<i64, Vec<u32>> {
        let mut blocks: BTreeMap<i64, Vec<u32>> = BTreeMap::new();
        for entry in capture.expected["engine_final_state"].as_array().expect("state") {
            let (group, hash) = entry.as_str().expect("text").split_once(' ').expect("group and hash");
            let hash = hash.parse::<u64>().expect("hash").cast_signed();
            blocks.entry(hash).or_default().push(group.parse().expect("group"));
        }
        blocks
    };
    for name in ["vllm-duplicate-blocks", "vllm-hybrid-swa"] {
        let capture = Capture::read(name);
        let blocks = engine(&capture);
        for components in [true, false] {
            let (mut stream, mut changes, mut held) =
                (Stream::new(Rules { components, ..rules() }), Chunker::default(), Held::default());
            for message in &capture.messages {
                stream.message(&message.frames, &mut changes);
            }
            held.take(&mut changes);
            // Group 0 is of full attention, group 1 of the window.
            let mask = |groups: &[u32]| groups.iter().fold(0, |mask, group| mask | 1 << group);
            let expected: BTreeMap<i64, u32> = blocks
                .iter()
                .filter(|(_, groups)| components || groups.contains(&0))
                .map(|(hash, groups)| (*hash, if components { mask(groups) } else { 0 }))
                .collect();
            assert_eq!(held.blocks, expected, "{name} {components}");
        }
    }
    // Read as a set, blocks that are still held are gone.
    let capture = Capture::read("vllm-duplicate-blocks");
    let rules = Rules { copies: Reading::Set, ..rules() };
    let (mut stream, mut changes, mut held) = (Stream::new(rules), Chunker::default(), Held::default());
    for message in &capture.messages {
        stream.message(&message.frames, &mut changes);
    }
    held.take(&mut changes);
    assert_eq!((held.blocks.len(), engine(&capture).len()), (14, 19));
}

/// One thing that happens between a publisher and its subscriber.
#[derive(Debug, Clone)]
enum Happening {
    /// A batch is sent, and arrives or is lost.
    Sent { arrives: bool },
    /// The last batch that arrived comes again.
    Again,
    /// The connection breaks and is made again; the publisher may have begun anew.
    Broken { anew: bool },
    /// The replay answers what was asked: so many batches of its end are cut, one in the middle is lost,
    /// the end marker comes or not.
    Answered { cut: usize, hole: Option<prop::sample::Index>, ended: bool },
    /// The replay answers nothing.
    Unanswered,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => prop::bool::weighted(0.8).prop_map(|arrives| Happening::Sent { arrives }),
        1 => Just(Happening::Again),
        1 => any::<bool>().prop_map(|anew| Happening::Broken { anew }),
        3 => (0_usize..4, prop::option::weighted(0.3, any::<prop::sample::Index>()), any::<bool>())
            .prop_map(|(cut, hole, ended)| Happening::Answered { cut, hole, ended }),
        1 => Just(Happening::Unanswered),
    ]
}

/// A publisher, a follower, and what the follower made of it.
struct World {
    follower: Follower,
    buffer: usize,
    clocks: bool,
    life: u64,
    sent: Vec<Batch>,
    question: Option<u64>,
    arrived: Option<Batch>,
    applied: Vec<(u64, u64)>,
    incomplete: bool,
    clears: u64,
    restarts: u64,
}

impl World {
    fn happen(&mut self, happening: &Happening) {
        match happening {
            Happening::Sent { arrives } => {
                let sequence = self.sent.len() as u64;
                let time = if self.clocks { (self.life * 1_000 + sequence) as f64 } else { 1.5 };
                let payload = format!("{} {sequence}", self.life).into();
                let batch = Batch { sequence, time: Some(time), payload };
                self.sent.push(batch.clone());
                if *arrives {
                    self.arrived = Some(batch.clone());
                    self.follower.live(batch);
                }
            }
            Happening::Again => {
                if let Some(batch) = self.arrived.clone() {
                    self.follower.live(batch);
                }
            }
            Happening::Broken { anew } => {
                self.follower.disconnected();
                self.arrived = None;
                if *anew {
                    self.life += 1;
                    self.sent.clear();
                }
                self.follower.connected();
            }
            Happening::Answered { cut, hole, ended } => self.answer(*cut, hole.as_ref(), *ended),
            Happening::Unanswered => {
                if self.question.take().is_some() {
                    self.follower.replay_failed();
                }
            }
        }
        self.settle();
    }

    fn answer(&mut self, cut: usize, hole: Option<&prop::sample::Index>, ended: bool) {
        let Some(from) = self.question.take() else { return };
        let first = self.sent.len().saturating_sub(self.buffer);
        let mut answer: Vec<Batch> =
            self.sent[first..].iter().filter(|batch| batch.sequence >= from).cloned().collect();
        answer.truncate(answer.len().saturating_sub(cut));
        if let Some(hole) = hole
            && !answer.is_empty()
        {
            answer.remove(hole.index(answer.len()));
        }
        for batch in answer {
            self.follower.replayed(batch);
            self.settle();
            // Asked anew: what is left of this answer never comes.
            if self.question.is_some() {
                return;
            }
        }
        if ended { self.follower.replay_ended() } else { self.follower.replay_failed() }
    }

    fn settle(&mut self) {
        while let Some(step) = self.follower.step() {
            match step {
                Step::Clear => {
                    self.applied.clear();
                    self.incomplete = false;
                    self.clears += 1;
                }
                Step::Apply(batch) => {
                    let text = String::from_utf8(batch.payload.to_vec()).expect("text");
                    let (life, _) = text.split_once(' ').expect("two");
                    self.applied.push((life.parse().expect("life"), batch.sequence));
                }
                Step::Missing { .. } => self.incomplete = true,
                Step::Restart => self.restarts += 1,
                _ => {}
            }
        }
        if let Some(from) = self.follower.question() {
            self.question = Some(from);
        }
    }
}

proptest! {
    #[test]
    fn what_is_applied_is_exact_or_marked(
        happenings in prop::collection::vec(happening(), 1..60),
        replays in any::<bool>(),
        clocks in any::<bool>(),
        buffer in 1_usize..12,
        held_max in prop::sample::select(vec![0_usize, 300, 1 << 20]),
    ) {
        let mut world = World {
            follower: Follower::with_held_max(replays, held_max),
            buffer, clocks, life: 0, sent: Vec::new(), question: None, arrived: None,
            applied: Vec::new(), incomplete: false, clears: 0, restarts: 0,
        };
        world.follower.connected();
        world.settle();
        for happening in &happenings {
            world.happen(happening);
            let ascends = world.applied.windows(2).all(|pair| pair[0].0 == pair[1].0 && pair[0].1 < pair[1].1);
            prop_assert!(ascends, "{:?}", world.applied);
        }
        // One more batch arrives, and what is asked for from now on is answered well, as far as the buffer goes.
        world.happen(&Happening::Sent { arrives: true });
        for _ in 0..200 {
            if world.question.is_none() {
                break;
            }
            world.happen(&Happening::Answered { cut: 0, hole: None, ended: true });
        }
        prop_assert!(!world.follower.repairing(), "the repair finds an end");
        if held_max > 0 || !replays {
            let last = world.sent.len() as u64 - 1;
            prop_assert_eq!(world.applied.last(), Some(&(world.life, last)));
        }
        if !world.incomplete {
            let whole: Vec<(u64, u64)> = (0..world.applied.len() as u64).map(|at| (world.life, at)).collect();
            prop_assert_eq!(&world.applied, &whole);
        }
        if replays && buffer >= world.sent.len() && held_max > 300 && happenings.len() < ATTEMPTS_MAX as usize {
            prop_assert!(!world.incomplete);
        }
    }
}
