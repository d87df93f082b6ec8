//! Engines that decode many sessions at once, over an index of steady size.
//!
//! A session's next turn is a prompt of sixteen blocks, stored at once, and some that are decoded,
//! stored one by one in turn with those of all other sessions under way. A session that rests comes back, mostly
//! after the others that rest, until it has had ten turns; who has rested longest is evicted.

use std::collections::VecDeque;

use sgl_kv_indexer::arena::Index;

use super::{PLAIN, Seeded, answer, report, revoke};

/// Sessions that are decoded at once.
const RUNNING: usize = 256;

/// Blocks of a turn's prompt, and at least and at most of what is decoded after it.
const PROMPT: usize = 16;
const DECODED: std::ops::Range<usize> = 16..48;

/// Turns after which a session does not come back.
const TURNS: usize = 10;

/// Sessions that rest before any comes back.
const RESTING_MIN: usize = 500;

/// Steps of maintenance after each block of all sessions.
const MAINTAINED: usize = 8;

const WORKERS: usize = 16;

#[derive(Debug, Default)]
struct Session {
    worker: usize,
    chain: Vec<i64>,
    left: usize,
    turns: usize,
}

#[derive(Debug)]
pub(crate) struct Engines {
    seeded: Seeded,
    /// Whoever has rested longest first.
    resting: VecDeque<Session>,
    running: Vec<Session>,
    sessions: usize,
    live: usize,
    blocks: usize,
    maintained: bool,
}

impl Engines {
    /// Engines that together keep so many blocks of an index that is maintained, or never is.
    pub(crate) fn new(seed: u64, blocks: usize, maintained: bool) -> Engines {
        let (seeded, resting, running) = (Seeded::new(seed), VecDeque::new(), Vec::new());
        Engines { seeded, resting, running, sessions: 0, live: 0, blocks, maintained }
    }

    /// Stores so many blocks more.
    pub(crate) fn run(&mut self, index: &Index, blocks: usize) {
        let mut stored = 0;
        while stored < blocks {
            while self.running.len() < RUNNING {
                stored += self.begin_turn(index);
            }
            stored += self.decode(index);
            while self.live > self.blocks {
                let Some(session) = self.resting.pop_front() else { break };
                let leaves: Vec<i64> = session.chain.iter().rev().copied().collect();
                leaves.chunks(64).for_each(|hashes| revoke(index, session.worker, hashes));
                self.live -= leaves.len();
            }
            let mut steps = if self.maintained { MAINTAINED } else { 0 };
            while steps > 0 && index.maintain() {
                steps -= 1;
            }
        }
    }

    /// Has a session come back, or another one begin; it is asked for first, as a router does.
    fn begin_turn(&mut self, index: &Index) -> usize {
        let rested = self.resting.len();
        let mut session = if rested > RESTING_MIN && self.seeded.below(4) > 0 {
            let place = rested - 1 - self.seeded.below(rested / 2);
            self.resting.remove(place).expect("a session that rests")
        } else {
            self.sessions += 1;
            Session { worker: self.sessions % WORKERS, ..Session::default() }
        };
        if !session.chain.is_empty() {
            let expected = vec![(session.worker as u32, session.chain.len() as u32)];
            assert_eq!(answer(index, &session.chain), expected, "a session is where it was");
        }
        let prompt = self.seeded.chain(PROMPT);
        report(index, session.worker, &prompt, PLAIN);
        session.chain.extend(prompt);
        session.turns += 1;
        session.left = DECODED.start + self.seeded.below(DECODED.len());
        self.running.push(session);
        self.live += PROMPT;
        PROMPT
    }

    /// Decodes a block of each session.
    fn decode(&mut self, index: &Index) -> usize {
        let decoded = self.running.len();
        for mut session in std::mem::take(&mut self.running) {
            let block = self.seeded.chain(1);
            report(index, session.worker, &block, PLAIN);
            session.chain.extend(block);
            session.left -= 1;
            match session.left {
                0 if session.turns < TURNS => self.resting.push_back(session),
                0 => self.resting.push_front(session),
                _ => self.running.push(session),
            }
        }
        self.live += decoded;
        decoded
    }

    /// What those that rest would be asked for.
    pub(crate) fn prompts(&self) -> Vec<Vec<i64>> {
        self.resting.iter().map(|session| session.chain.clone()).collect()
    }
}
