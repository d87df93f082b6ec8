//! What a stream's sequence numbers say: pure, with no socket and no clock.
//!
//! A publisher counts its batches from 0 at each of its starts, with no epoch to
//! tell two lives apart. This follows the numbers and names what they show; what
//! is done about it is the caller's.

/// What one number shows, given those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The first number seen; earlier batches, if it is not 0, were never received.
    First,
    /// The one expected.
    Next,
    /// Numbers are missing before it.
    Gap {
        /// First number that is missing.
        from: u64,
        /// How many are missing.
        missing: u64,
    },
    /// The last number again.
    Repeat,
    /// A number that was passed before: a publisher that began anew, or an old batch again.
    Back {
        /// The highest number before.
        last: u64,
    },
}

/// Follows the numbers of one stream.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    last: Option<u64>,
}

impl Sequence {
    /// Takes the next number that arrived.
    pub(super) fn step(&mut self, number: u64) -> Step {
        let step = match self.last {
            None => Step::First,
            Some(last) if number == last => Step::Repeat,
            Some(last) if number < last => Step::Back { last },
            Some(last) if number - last == 1 => Step::Next,
            Some(last) => Step::Gap { from: last + 1, missing: number - last - 1 },
        };
        self.last = Some(number);
        step
    }

    /// The last number that arrived.
    pub(super) fn last(&self) -> Option<u64> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_show_gaps_repeats_and_new_beginnings() {
        let mut sequence = Sequence::default();
        let rows = [
            (0, Step::First),
            (1, Step::Next),
            (1, Step::Repeat),
            (5, Step::Gap { from: 2, missing: 3 }),
            (6, Step::Next),
            (0, Step::Back { last: 6 }),
            (1, Step::Next),
            (u64::MAX, Step::Gap { from: 2, missing: u64::MAX - 2 }),
        ];
        for (number, step) in rows {
            assert_eq!(sequence.step(number), step, "{number}");
            assert_eq!(sequence.last(), Some(number));
        }
    }
}
