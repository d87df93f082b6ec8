//! What one stream has been through, in numbers: for the logs and for `status`.
//!
//! It counts and says when a warning is worth a line; it decides nothing.

use std::fmt;
use std::time::SystemTime;

/// Why a stream's placements may differ from the engine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incomplete {
    /// Batches went missing on the way.
    Gap,
    /// The stream was joined when its publisher had sent batches before.
    JoinedLate,
    /// A batch or an event could not be understood.
    Undecodable,
    /// A batch of another rank came.
    ForeignRank,
    /// More blocks than are counted have copies or groups.
    Uncounted,
    /// The worker was gone for too long, and its placements were withdrawn.
    Withdrawn,
    /// The mirror took no further block.
    Full,
}

/// Counts of one stream since its bridge started.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// Whether the publisher is connected.
    pub connected: bool,
    /// Batches applied.
    pub batches: u64,
    /// Events applied.
    pub events: u64,
    /// Payload bytes of the batches applied.
    pub payload_bytes: u64,
    /// Messages that are no batch of this stream.
    pub foreign_messages: u64,
    /// Batches that could not be understood.
    pub undecodable_batches: u64,
    /// Events that could not be understood, their siblings applied.
    pub undecodable_events: u64,
    /// Events of no known kind.
    pub unknown_tags: u64,
    /// Events at a medium that is no local tier.
    pub unknown_media: u64,
    /// Names of no known component.
    pub unknown_components: u64,
    /// Stores for a cache group of a kind that the contract has no component for. They are followed
    /// like others, but add no component to a placement.
    pub unknown_groups: u64,
    /// Breaks in the sequence.
    pub gaps: u64,
    /// Batches that stay missing.
    pub missing_batches: u64,
    /// Batches that the replay gave.
    pub repaired_batches: u64,
    /// Live batches that did not fit while a replay was awaited; asked for again.
    pub dropped_batches: u64,
    /// Times that the replay socket stopped answering.
    pub replay_failures: u64,
    /// Times that the publisher began anew.
    pub restarts: u64,
    /// Batches that came again and were left out.
    pub repeats: u64,
    /// Batches of another rank.
    pub foreign_ranks: u64,
    /// Blocks whose copies or groups are not followed, as too many are.
    pub uncounted_blocks: u64,
    /// Blocks that were not reported, as the mirror was full.
    pub left_out_blocks: u64,
    /// Times that the file of the stream's mirror could not be kept; it is kept no longer then.
    pub mirror_file_errors: u64,
    /// Connections lost.
    pub disconnects: u64,
    /// Times that the placements were withdrawn, as the worker was gone.
    pub withdrawals: u64,
    /// Set at the first loss until all is known again: since when, and why.
    pub incomplete: Option<(SystemTime, Incomplete)>,
}

impl Health {
    /// Notes that something is lost; whether the stream was complete before.
    pub fn lose(&mut self, why: Incomplete) -> bool {
        let was_complete = self.incomplete.is_none();
        self.incomplete.get_or_insert_with(|| (SystemTime::now(), why));
        was_complete
    }

    /// Notes that all is known again; whether the stream was incomplete before.
    pub fn regain(&mut self) -> bool {
        self.incomplete.take().is_some()
    }

    /// Whether the worker's placements are withdrawn and it has not come back.
    pub fn is_withdrawn(&self) -> bool {
        matches!(self.incomplete, Some((_, Incomplete::Withdrawn)))
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            ("batches", self.batches),
            ("events", self.events),
            ("payload_bytes", self.payload_bytes),
            ("foreign_messages", self.foreign_messages),
            ("undecodable_batches", self.undecodable_batches),
            ("undecodable_events", self.undecodable_events),
            ("unknown_tags", self.unknown_tags),
            ("unknown_media", self.unknown_media),
            ("unknown_components", self.unknown_components),
            ("unknown_groups", self.unknown_groups),
            ("gaps", self.gaps),
            ("missing_batches", self.missing_batches),
            ("repaired_batches", self.repaired_batches),
            ("dropped_batches", self.dropped_batches),
            ("replay_failures", self.replay_failures),
            ("restarts", self.restarts),
            ("repeats", self.repeats),
            ("foreign_ranks", self.foreign_ranks),
            ("uncounted_blocks", self.uncounted_blocks),
            ("left_out_blocks", self.left_out_blocks),
            ("mirror_file_errors", self.mirror_file_errors),
            ("disconnects", self.disconnects),
            ("withdrawals", self.withdrawals),
        ];
        f.write_str(if self.incomplete.is_some() { "incomplete" } else { "complete" })?;
        if let Some((since, why)) = self.incomplete {
            let seconds = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            write!(f, " since={seconds} why={why:?}")?;
        }
        counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .try_for_each(|(name, count)| write!(f, " {name}={count}"))
    }
}

/// Whether a count that was just raised by `added` is worth a line: it passed
/// 1, 2, 4, 8, …, so that a flood of one fault is told in few lines.
pub fn is_loud(total: u64, added: u64) -> bool {
    let before = total.saturating_sub(added);
    added > 0 && before.checked_ilog2() != total.checked_ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_in_few_lines() {
        let loud: Vec<u64> = (1..=20).filter(|total| is_loud(*total, 1)).collect();
        assert_eq!(loud, [1, 2, 4, 8, 16]);
        assert!(is_loud(5, 2) && !is_loud(7, 2) && !is_loud(3, 0));
    }

    #[test]
    fn health_names_only_what_happened() {
        let mut health = Health { batches: 7, gaps: 1, ..Health::default() };
        assert_eq!(health.to_string(), "complete batches=7 gaps=1");
        assert!(health.lose(Incomplete::Gap));
        assert!(!health.lose(Incomplete::Undecodable));
        assert!(health.to_string().contains("why=Gap"), "{health}");
        assert!(health.regain() && !health.regain());
    }
}
