//! Chunks without blocks, whose ghosts are swept out of the table.

use std::ops::Range;

/// Some chunks, by number.
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

    /// From the first of them to behind the last, if they lie side by side: so do those of a worker whose blocks
    /// came in one go.
    #[inline]
    pub(super) fn range(&self) -> Option<Range<u32>> {
        (!self.sparse).then(|| self.first as u32..(self.first + self.flags.len()) as u32)
    }

    /// Whether a chunk is one of them.
    #[inline]
    pub(super) fn contains(&self, number: usize) -> bool {
        self.flags.get(number.wrapping_sub(self.first)).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_given_and_a_range_where_none_is_missing() {
        for (numbers, range) in [
            (&[][..], Some(0..0)),
            (&[0], Some(0..1)),
            (&[7], Some(7..8)),
            (&[3, 4, 5], Some(3..6)),
            (&[3, 5], None),
            (&[0, 1, 9], None),
        ] {
            let idle = Idle::new(numbers.iter().copied());
            assert_eq!(idle.range(), range, "{numbers:?}");
            let contained: Vec<usize> = (0..12).filter(|number| idle.contains(*number)).collect();
            assert_eq!(contained, numbers);
        }
    }
}
