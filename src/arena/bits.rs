//! Bitmaps over the slots of a chunk, and searches that never look further than asked.

/// Words of a bitmap.
pub(super) const WORDS: usize = super::blocks::CHUNK_SLOTS / 64;

/// One bit per slot.
pub(super) type Bits = [u64; WORDS];

#[inline]
pub(super) fn get(bits: &Bits, slot: usize) -> bool {
    bits[slot / 64] >> (slot % 64) & 1 == 1
}

#[inline]
pub(super) fn put(word: &mut u64, slot: usize, value: bool) {
    *word = (*word & !(1 << (slot % 64))) | (u64::from(value) << (slot % 64));
}

/// How many of the bytes of a word are zero.
pub(super) fn zero_bytes(word: u64) -> usize {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The highest bit of a byte is set where any other is, or it is itself; no sum reaches the next byte.
    (!(((word & LOW) + LOW) | word | LOW)).count_ones() as usize
}

/// The words that hold the bits of `from..to`, each with the mask of those bits.
pub(super) fn masks(from: usize, to: usize) -> impl Iterator<Item = (usize, u64)> {
    let mut slot = from;
    std::iter::from_fn(move || {
        (slot < to).then(|| {
            let start = slot;
            slot = (slot / 64 * 64 + 64).min(to);
            (start / 64, (!0u64 >> (64 - (slot - start))) << (start % 64))
        })
    })
}

/// Sets or clears the bits of `from..to`.
#[inline]
pub(super) fn put_range(bits: &mut Bits, from: usize, to: usize, value: bool) {
    if to - from == 1 {
        return put(&mut bits[from / 64], from, value);
    }
    for (number, mask) in masks(from, to) {
        bits[number] = if value { bits[number] | mask } else { bits[number] & !mask };
    }
}

/// Number of set bits.
pub(super) fn count(bits: &Bits) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}

/// Number of set bits of `from..to` in the words that `word` gives.
pub(super) fn count_range(from: usize, to: usize, word: impl Fn(usize) -> u64) -> usize {
    masks(from, to).map(|(number, mask)| (word(number) & mask).count_ones() as usize).sum()
}

/// The first slot of `from..to` with a set bit in the words that `word` gives, else `to`.
#[inline]
pub(super) fn next(from: usize, to: usize, word: impl Fn(usize) -> u64) -> usize {
    if from >= to {
        return to;
    }
    let mut number = from / 64;
    let mut bits = word(number) & (!0 << (from % 64));
    while bits == 0 {
        number += 1;
        if number * 64 >= to {
            return to;
        }
        bits = word(number);
    }
    to.min(number * 64 + bits.trailing_zeros() as usize)
}

/// The slots of `from..to` with a set bit in the words that `word` gives, ascending.
#[inline]
pub(super) fn ones(from: usize, to: usize, word: impl Fn(usize) -> u64) -> impl Iterator<Item = usize> {
    let mut number = from / 64;
    let mut bits = if from < to { word(number) & (!0 << (from % 64)) } else { 0 };
    std::iter::from_fn(move || {
        while bits == 0 {
            number += 1;
            if number * 64 >= to {
                return None;
            }
            bits = word(number);
        }
        let slot = number * 64 + bits.trailing_zeros() as usize;
        bits &= bits - 1;
        (slot < to).then_some(slot)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These slots' bits.
    fn with(slots: &[usize]) -> Bits {
        let mut bits = [0; WORDS];
        slots.iter().for_each(|slot| put(&mut bits[slot / 64], *slot, true));
        bits
    }

    #[test]
    fn ranges_cover_their_slots_and_no_others() {
        for (from, to) in
            [(0, 0), (0, 1), (63, 64), (63, 65), (64, 128), (5, 300), (WORDS * 64 - 1, WORDS * 64)]
        {
            let mut bits = [0; WORDS];
            put_range(&mut bits, from, to, true);
            assert!(
                (0..WORDS * 64).all(|slot| get(&bits, slot) == (from..to).contains(&slot)),
                "{from}..{to}"
            );
            assert_eq!(count(&bits), to - from);
            put_range(&mut bits, from, to, false);
            assert_eq!(count(&bits), 0, "{from}..{to}");
        }
    }

    #[test]
    fn ones_are_the_set_bits_of_the_range() {
        let slots = [0, 5, 63, 64, 70, 200, 4095];
        let bits = with(&slots);
        for (from, to) in
            [(0, 0), (0, 1), (1, 64), (5, 70), (64, 71), (71, 200), (201, 4096), (0, WORDS * 64)]
        {
            let expected: Vec<usize> = slots.into_iter().filter(|slot| (from..to).contains(slot)).collect();
            assert_eq!(ones(from, to, |word| bits[word]).collect::<Vec<_>>(), expected, "{from}..{to}");
            assert_eq!(count_range(from, to, |word| bits[word]), expected.len(), "{from}..{to}");
        }
    }

    #[test]
    fn zero_bytes_are_counted() {
        for bytes in
            [[0; 8], [1; 8], [0x80; 8], [0, 1, 0x80, 0, 0xff, 0x7f, 0, 0], [0xff, 0, 0, 0, 0, 0, 0, 1]]
        {
            let expected = bytes.iter().filter(|byte| **byte == 0).count();
            assert_eq!(zero_bytes(u64::from_le_bytes(bytes)), expected, "{bytes:?}");
        }
    }

    #[test]
    fn the_next_bit_lies_within_what_was_asked() {
        let bits = with(&[70, 200]);
        for (from, to, expected) in
            [(0, 300, 70), (70, 300, 70), (71, 300, 200), (71, 199, 199), (71, 71, 71), (201, 4096, 4096)]
        {
            assert_eq!(next(from, to, |word| bits[word]), expected, "{from}..{to}");
        }
    }
}
