//! Chunks without blocks, whose ghosts are swept out of the table.

use std::ops::Range;

/// Some chunks, by number. Mostly they lie side by side, and then which they are is a range.
#[derive(Debug)]
pub(super) struct Idle {
    first: usize,
    /// From the first of them to the last, whether it is one.
    flags: Vec<bool>,
    sparse: bool,
}

impl Idle {
    /// Of ascending numbers.
    pub(super) fn new(numbers: impl Iterator<Item = usize>) -> Self {
        let (mut first, mut flags, mut count) = (0, Vec::new(), 0);
        for number in numbers {
            if count == 0 {
                first = number;
            }
            flags.resize(number - first, false);
            flags.push(true);
            count += 1;
        }
        let sparse = count < flags.len();
        Idle { first, flags, sparse }
    }

    /// From the first of them to behind the last.
    #[inline]
    pub(super) fn chunks(&self) -> Range<u32> {
        self.first as u32..(self.first + self.flags.len()) as u32
    }

    /// Whether there are others among [`Idle::chunks`].
    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.sparse
    }

    /// Whether a chunk of [`Idle::chunks`] is one of them.
    #[inline]
    pub(super) fn contains(&self, number: usize) -> bool {
        self.flags[number - self.first]
    }
}
