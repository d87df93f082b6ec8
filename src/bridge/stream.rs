//! One engine's stream: messages in, changes out, with its health kept.
//!
//! No socket and no clock of its own, so every order of messages can be tried in
//! a test. What is known of lost batches is counted here; nothing is repaired.

use bytes::Bytes;
use tracing::{info, warn};

use super::chunker::Chunker;
use super::event::{Change, Decoder, LeftOut};
use super::framing::{self, Frame};
use super::health::{Health, Incomplete, is_loud};
use super::sequence::{Sequence, Step};
use crate::pb::TierType as Tier;

/// Turns the messages of one stream into changes.
#[derive(Debug)]
pub struct Stream {
    topic: String,
    clear_tiers: Vec<Tier>,
    sequence: Sequence,
    decoder: Decoder,
    health: Health,
}

impl Stream {
    /// A stream that has seen nothing; an empty `topic` takes every topic.
    pub fn new(topic: String, clear_tiers: Vec<Tier>) -> Self {
        let (sequence, decoder, health) = (Sequence::default(), Decoder::default(), Health::default());
        Stream { topic, clear_tiers, sequence, decoder, health }
    }

    /// What the stream has been through.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Number of the last batch that arrived.
    pub fn last_sequence(&self) -> Option<u64> {
        self.sequence.last()
    }

    /// Takes word that the publisher's connection is gone.
    pub fn disconnected(&mut self) {
        self.health.disconnects += 1;
    }

    /// Takes one message and pushes its changes, in order.
    pub fn message(&mut self, frames: &[Bytes], changes: &mut Chunker) {
        let frame = match framing::parse(frames, &self.topic) {
            Ok(frame) => frame,
            Err(error) => {
                self.health.foreign_messages += 1;
                let total = self.health.foreign_messages;
                if is_loud(total, 1) {
                    warn!(total, "skipped a message that is no batch of this stream: {error}");
                }
                return;
            }
        };
        self.follow(frame.sequence);
        self.apply(&frame, changes);
    }

    /// Follows the sequence. Every batch is applied whatever its number shows.
    fn follow(&mut self, number: u64) {
        let health = &mut self.health;
        match self.sequence.step(number) {
            Step::Next => {}
            Step::First if number == 0 => info!("following the stream from its first batch"),
            Step::First => {
                health.lose(Incomplete::JoinedLate);
                warn!(sequence = number, "joined a stream under way: what it stored before is unknown");
            }
            Step::Gap { from, missing } => {
                health.gaps += 1;
                health.missing_batches = health.missing_batches.saturating_add(missing);
                health.lose(Incomplete::Gap);
                if is_loud(health.gaps, 1) {
                    let (gaps, missing_in_all) = (health.gaps, health.missing_batches);
                    warn!(from, missing, gaps, missing_in_all, "batches are missing from the stream");
                }
            }
            Step::Repeat => {
                health.repeats += 1;
                if is_loud(health.repeats, 1) {
                    warn!(sequence = number, repeats = health.repeats, "a sequence number came again");
                }
            }
            Step::Back { last } => {
                health.restarts += 1;
                if is_loud(health.restarts, 1) {
                    let restarts = health.restarts;
                    warn!(
                        sequence = number,
                        last, restarts, "the sequence went back: the publisher began anew"
                    );
                }
            }
        }
    }

    fn apply(&mut self, frame: &Frame, changes: &mut Chunker) {
        let Stream { decoder, health, clear_tiers, .. } = self;
        let batch = match decoder.decode(&frame.payload) {
            Ok(batch) => batch,
            Err(error) => {
                health.undecodable_batches += 1;
                health.lose(Incomplete::Undecodable);
                let total = health.undecodable_batches;
                if is_loud(total, 1) {
                    warn!(sequence = frame.sequence, total, "skipped a batch: {error}");
                }
                return;
            }
        };
        for event in batch.events {
            match event.change {
                Change::Stored { tier, mask, block_tokens } => {
                    changes.report(tier, mask, block_tokens, batch.hashes(event));
                }
                Change::Removed { tier } => changes.revoke(tier, batch.hashes(event)),
                Change::Cleared => changes.clear(clear_tiers),
            }
        }
        health.batches += 1;
        health.payload_bytes += frame.payload.len() as u64;
        leave_out(health, frame.sequence, batch.left_out);
    }
}

/// Counts what of a batch was left out, and warns.
fn leave_out(health: &mut Health, sequence: u64, left_out: LeftOut) {
    let LeftOut { undecodable, first_error, unknown_tags, unknown_media, unknown_components } = left_out;
    health.undecodable_events += undecodable;
    health.unknown_tags += unknown_tags;
    health.unknown_media += unknown_media;
    health.unknown_components += unknown_components;
    if let Some(error) = first_error {
        health.lose(Incomplete::Undecodable);
        let total = health.undecodable_events;
        if is_loud(total, undecodable) {
            warn!(sequence, total, "skipped an event and kept its siblings: {error}");
        }
    }
    let skipped = [
        (health.unknown_tags, unknown_tags, "skipped an event of an unknown kind"),
        (health.unknown_media, unknown_media, "skipped an event at a medium that is no local tier"),
        (health.unknown_components, unknown_components, "left out a component of an unknown name"),
    ];
    for (total, added, what) in skipped {
        if is_loud(total, added) {
            warn!(sequence, total, "{what}");
        }
    }
}
