//! The keyed mix of block hashes.
//!
//! Block hashes look random but a test or an attacker may send 1, 2, 3 …,
//! multiples of 2^32, or hashes chosen to collide. One folded multiplication
//! by secret keys makes all of them as good as random. Cost: a multiplication.

use std::hash::{BuildHasher, RandomState};

/// A keyed 64-bit mix; the keys differ in every index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mix {
    offset: u64,
    factor: u64,
}

impl Mix {
    /// A mix with keys that nobody outside knows.
    pub(crate) fn random() -> Self {
        let keys = RandomState::new();
        Mix { offset: keys.hash_one(1u8), factor: keys.hash_one(2u8) | 1 }
    }

    /// A mix with given keys. A factor of zero maps everything to zero: the worst there can be, for tests.
    pub(crate) fn with_keys(offset: u64, factor: u64) -> Self {
        Mix { offset, factor }
    }

    /// Mixes `value`; every bit of the result depends on every bit of it.
    #[inline]
    pub(crate) fn mix(self, value: u64) -> u64 {
        let product = u128::from(value ^ self.offset) * u128::from(self.factor);
        (product as u64) ^ ((product >> 64) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of the mix takes nearly all of its values over each hostile family.
    #[test]
    fn hostile_families_spread_over_every_byte() {
        let mix = Mix::random();
        let mut families: Vec<Vec<u64>> =
            (0..54).map(|shift| (0..4096u64).map(|n| n.wrapping_shl(shift)).collect()).collect();
        families.push((0..4096u64).map(|n| n << 32 | 0xdead_beef).collect());
        families.push((0..4096u64).map(|n| n | 0xdead_beef << 32).collect());
        for (number, family) in families.iter().enumerate() {
            for byte in 0..8 {
                let mut seen = [false; 256];
                for value in family {
                    seen[(mix.mix(*value) >> (8 * byte)) as usize & 0xff] = true;
                }
                let values = seen.iter().filter(|seen| **seen).count();
                assert!(values > 128, "family {number}: byte {byte} takes {values} values with {mix:?}");
            }
        }
    }
}
