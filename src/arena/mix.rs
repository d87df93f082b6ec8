//! The keyed mix of block hashes.
//!
//! Block hashes look random but a test or an attacker may send 1, 2, 3 …,
//! multiples of 2^32, or hashes chosen to collide. Two folded multiplications by
//! secret keys make all of them as good as random. One would do against chosen
//! hashes, but for some keys it leaves a byte of its result with few values over
//! arithmetic sequences. Cost: two multiplications.

use std::hash::{BuildHasher, RandomState};

/// A keyed 64-bit mix; the keys differ in every index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mix {
    offset: u64,
    factors: [u64; 2],
}

/// The upper and lower half of a product, folded together.
#[inline]
fn fold(value: u64, factor: u64) -> u64 {
    let product = u128::from(value) * u128::from(factor);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Mix {
    /// A mix with keys that nobody outside knows.
    pub(crate) fn random() -> Self {
        let keys = RandomState::new();
        Mix { offset: keys.hash_one(1u8), factors: [2u8, 3].map(|key| keys.hash_one(key) | 1) }
    }

    /// A mix with keys of no meaning that everybody knows, for counts that repeat.
    pub(crate) fn fixed() -> Self {
        Mix { offset: 0x5be2_1f64_90c7_33a9, factors: [0x9d3f_7a15_c2e8_4b67, 0xe6b1_04d9_8f52_73cd] }
    }

    /// A mix that maps everything to zero: the worst there can be, for tests.
    pub(crate) fn colliding() -> Self {
        Mix { offset: 0, factors: [0; 2] }
    }

    /// Mixes `value`; every bit of the result depends on every bit of it.
    #[inline]
    pub(crate) fn mix(self, value: u64) -> u64 {
        fold(fold(value ^ self.offset, self.factors[0]), self.factors[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of the mix takes nearly all of its values over each hostile family.
    #[test]
    fn hostile_families_spread_over_every_byte() {
        for mix in std::iter::repeat_with(Mix::random).take(20) {
            spreads(mix);
        }
    }

    fn spreads(mix: Mix) {
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
                assert!(values > 200, "family {number}: byte {byte} takes {values} values with {mix:?}");
            }
        }
    }
}
