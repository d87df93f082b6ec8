//! One engine's stream: messages in, changes out, with its health kept.
//!
//! No socket and no clock of its own, so every order of messages can be tried in
//! a test. [`follow`](super::follow) decides which batches count, [`copies`](super::copies)
//! what is left of a block when one goes; this decodes, pushes and counts.

use std::time::SystemTime;

use bytes::Bytes;
use tracing::{info, warn};

use super::chunker::Chunker;
use super::copies::{Copies, Reading};
use super::event::{self, Change, Decoder, LeftOut};
use super::follow::{Batch, Follower, Mark, Step};
use super::framing;
use super::health::{Health, Incomplete, is_loud};
use crate::pb::TierType as Tier;

/// What is known of a stream beforehand.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rules {
    /// The worker, for the logs.
    pub worker_id: String,
    /// The publisher's topic; empty takes every topic.
    pub topic: String,
    /// Tiers that a clear empties.
    pub clear_tiers: Vec<Tier>,
    /// Whether there is a replay socket.
    pub replays: bool,
    /// How stores and removals are read.
    pub copies: Reading,
    /// Whether the worker's spec has components.
    pub components: bool,
    /// The rank that batches have to be of, where they say one.
    pub rank: Option<i64>,
}

/// Turns the messages of one stream into changes.
#[derive(Debug)]
pub struct Stream {
    rules: Rules,
    follower: Follower,
    decoder: Decoder,
    copies: Copies,
    health: Health,
    /// Whether nothing was pushed since a clear, or at all: then the engine's own first clear says nothing new.
    void: bool,
    /// What was kept from before the start, until it is proved or void.
    kept: Option<Kept>,
    /// What came of it, until it is asked for.
    outcome: Option<bool>,
}

/// What is kept of a stream beside its placements.
#[derive(Debug)]
pub(super) struct Kept {
    /// The last batch applied.
    pub(super) mark: Mark,
    /// Whether something was missing, since when and why.
    pub(super) incomplete: Option<(SystemTime, Incomplete)>,
    /// The copies of the placements.
    pub(super) copies: Copies,
}

impl Stream {
    /// A stream that has seen nothing.
    pub fn new(rules: Rules) -> Self {
        let copies = Copies::new(rules.copies, rules.components);
        let (follower, decoder) = (Follower::new(rules.replays), Decoder::default());
        Stream {
            rules,
            follower,
            decoder,
            copies,
            health: Health::default(),
            void: true,
            kept: None,
            outcome: None,
        }
    }

    /// Goes on from what was kept once the publisher has proved that it is of its present
    /// life; before anything else is told.
    pub(super) fn resume(&mut self, kept: Kept) {
        self.follower.resume(kept.mark);
        self.kept = Some(kept);
    }

    /// Whether what was kept has been proved or found void, told once.
    pub(super) fn outcome(&mut self) -> Option<bool> {
        self.outcome.take()
    }

    /// The last batch applied in the present life, also while that is not proved.
    pub(super) fn mark(&self) -> Option<Mark> {
        self.follower.mark()
    }

    /// The copies of what the worker holds.
    pub(super) fn copies(&mut self) -> &mut Copies {
        &mut self.copies
    }

    /// Takes word that the mirror's file is kept no longer.
    pub(super) fn not_kept(&mut self) {
        self.health.mirror_file_errors += 1;
    }

    /// What the stream has been through.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Number of the last batch that was applied in this life of the publisher.
    pub fn last_sequence(&self) -> Option<u64> {
        self.follower.last().filter(|_| self.kept.is_none())
    }

    /// The number from which the replay is to be asked now, told once.
    pub fn question(&mut self) -> Option<u64> {
        self.follower.question()
    }

    /// Whether a replay is being taken.
    pub fn repairing(&self) -> bool {
        self.follower.repairing()
    }

    /// Takes word that blocks were left out, as the mirror is full.
    pub fn left_out(&mut self, blocks: usize) {
        if blocks > 0 {
            self.health.left_out_blocks += blocks as u64;
            if is_loud(self.health.left_out_blocks, blocks as u64) {
                let (worker, total) = (&self.rules.worker_id, self.health.left_out_blocks);
                warn!(worker, total, "left out blocks: the mirror is full");
            }
            self.lose(Incomplete::Full);
        }
    }

    /// Takes word of a publisher's connection.
    pub fn connected(&mut self) {
        self.health.connected = true;
        self.follower.connected();
    }

    /// Takes word that the publisher's connection is gone.
    pub fn disconnected(&mut self) {
        self.health.connected = false;
        self.health.disconnects += 1;
        self.follower.disconnected();
    }

    /// Withdraws what the worker holds, as it is gone for too long.
    pub fn withdraw(&mut self, changes: &mut Chunker) {
        self.follower.withdraw();
        self.health.withdrawals += 1;
        self.settle(changes);
        self.lose(Incomplete::Withdrawn);
    }

    /// Takes one live message and pushes its changes, in order.
    pub fn message(&mut self, frames: &[Bytes], changes: &mut Chunker) {
        match framing::parse(frames, &self.rules.topic) {
            Ok(frame) => {
                let time = event::time_of(&frame.payload);
                self.follower.live(Batch { sequence: frame.sequence, time, payload: frame.payload });
                self.settle(changes);
            }
            Err(error) => {
                self.health.foreign_messages += 1;
                let total = self.health.foreign_messages;
                if is_loud(total, 1) {
                    warn!(total, "skipped a message that is no batch of this stream: {error}");
                }
            }
        }
    }

    /// Takes one batch of a replay.
    pub fn replayed(&mut self, batch: Batch, changes: &mut Chunker) {
        self.follower.replayed(batch);
        self.settle(changes);
    }

    /// Takes the end marker of a replay.
    pub fn replay_ended(&mut self, changes: &mut Chunker) {
        self.follower.replay_ended();
        self.settle(changes);
    }

    /// Takes word that the replay socket stopped answering.
    pub fn replay_failed(&mut self, changes: &mut Chunker) {
        self.health.replay_failures += 1;
        self.follower.replay_failed();
        self.settle(changes);
    }

    /// Does what the follower has decided.
    fn settle(&mut self, changes: &mut Chunker) {
        while let Some(step) = self.follower.step() {
            let health = &mut self.health;
            match step {
                Step::Resumed => self.take_up(),
                Step::Clear => {
                    if self.kept.take().is_some() {
                        info!(worker = self.rules.worker_id, "what was kept is not proved and is dropped");
                        self.outcome = Some(false);
                    }
                    self.copies.clear();
                    changes.clear(&self.rules.clear_tiers);
                    self.void = true;
                    self.regain();
                }
                Step::Apply(batch) => self.apply(&batch, changes),
                Step::Restart => {
                    health.restarts += 1;
                    if is_loud(health.restarts, 1) {
                        let restarts = health.restarts;
                        warn!(worker = self.rules.worker_id, restarts, "the publisher began anew");
                    }
                }
                Step::Gap { from, count } => {
                    health.gaps += 1;
                    if is_loud(health.gaps, 1) {
                        let (worker, gaps) = (&self.rules.worker_id, health.gaps);
                        warn!(worker, from, count, gaps, "batches are missing from the stream");
                    }
                }
                Step::Missing { count, head, .. } => {
                    health.missing_batches = health.missing_batches.saturating_add(count);
                    self.lose(if head { Incomplete::JoinedLate } else { Incomplete::Gap });
                }
                Step::Repeat(sequence) => {
                    health.repeats += 1;
                    if is_loud(health.repeats, 1) {
                        warn!(sequence, repeats = health.repeats, "a batch came again and was left out");
                    }
                }
                Step::Repaired => health.repaired_batches += 1,
                Step::Dropped(sequence) => {
                    health.dropped_batches += 1;
                    if is_loud(health.dropped_batches, 1) {
                        let dropped = health.dropped_batches;
                        warn!(sequence, dropped, "dropped a batch: too many wait for a replay");
                    }
                }
            }
        }
    }

    /// Goes on with what was kept.
    fn take_up(&mut self) {
        let Some(Kept { mark, incomplete, mut copies }) = self.kept.take() else { return };
        if self.copies.notes_changes() {
            copies.note_changes();
        }
        (self.copies, self.void, self.outcome) = (copies, false, Some(true));
        self.health.incomplete = incomplete;
        let complete = incomplete.is_none();
        info!(worker = self.rules.worker_id, last = mark.sequence, complete, "goes on from what was kept");
    }

    fn lose(&mut self, why: Incomplete) {
        if self.health.lose(why) {
            warn!(
                worker = self.rules.worker_id,
                last = self.follower.last(),
                ?why,
                "the stream is incomplete"
            );
        }
    }

    fn regain(&mut self) {
        if self.health.regain() {
            info!(worker = self.rules.worker_id, "the stream is complete again");
        }
    }

    fn apply(&mut self, frame: &Batch, changes: &mut Chunker) {
        let Stream { decoder, health, copies, rules, void, .. } = self;
        let batch = match decoder.decode(&frame.payload) {
            Ok(batch) => batch,
            Err(error) => {
                health.undecodable_batches += 1;
                let total = health.undecodable_batches;
                if is_loud(total, 1) {
                    warn!(sequence = frame.sequence, total, "skipped a batch: {error}");
                }
                self.lose(Incomplete::Undecodable);
                return;
            }
        };
        if let Some((wanted, found)) = rules.rank.zip(batch.rank).filter(|(wanted, found)| wanted != found) {
            health.foreign_ranks += 1;
            if is_loud(health.foreign_ranks, 1) {
                let (worker, total) = (&rules.worker_id, health.foreign_ranks);
                warn!(worker, total, wanted, found, "skipped a batch of another rank: check the ports");
            }
            self.lose(Incomplete::ForeignRank);
            return;
        }
        copies.see(batch.dialect);
        let overflows = copies.overflows();
        let mut cleared = frame.sequence == 0 && health.is_withdrawn();
        for event in batch.events {
            if event.change == Change::Cleared {
                if !*void {
                    changes.clear(&rules.clear_tiers);
                }
                cleared = true;
            }
            *void = event.change == Change::Cleared;
            copies.apply(event, batch.hashes(event), changes);
        }
        health.batches += 1;
        health.events += batch.events.len() as u64;
        health.payload_bytes += frame.payload.len() as u64;
        health.uncounted_blocks = copies.overflows();
        let uncounted = copies.overflows() > overflows;
        let lost = leave_out(health, frame.sequence, batch.left_out);
        if cleared {
            // Whatever was missed before, nothing is held now.
            self.regain();
        }
        if lost {
            self.lose(Incomplete::Undecodable);
        }
        if uncounted {
            self.lose(Incomplete::Uncounted);
        }
    }
}

/// Counts what of a batch was left out, and warns; whether an event was lost.
fn leave_out(health: &mut Health, sequence: u64, left_out: LeftOut) -> bool {
    let LeftOut { undecodable, first_error, unknown_tags, unknown_media, unknown_components, unknown_groups } =
        left_out;
    health.undecodable_events += undecodable;
    health.unknown_tags += unknown_tags;
    health.unknown_media += unknown_media;
    health.unknown_components += unknown_components;
    health.unknown_groups += unknown_groups;
    if let Some(error) = first_error {
        let total = health.undecodable_events;
        if is_loud(total, undecodable) {
            warn!(sequence, total, "skipped an event and kept its siblings: {error}");
        }
    }
    let skipped = [
        (health.unknown_tags, unknown_tags, "skipped an event of an unknown kind"),
        (health.unknown_media, unknown_media, "skipped an event at a medium that is no local tier"),
        (health.unknown_components, unknown_components, "left out a component of an unknown name"),
        (health.unknown_groups, unknown_groups, "a cache group is of a kind that has no component"),
    ];
    for (total, added, what) in skipped {
        if is_loud(total, added) {
            warn!(sequence, total, "{what}");
        }
    }
    first_error.is_some()
}
