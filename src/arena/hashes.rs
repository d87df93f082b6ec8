//! Block hashes as they stand on the wire.
//!
//! A packed `repeated sfixed64` is its little-endian bytes, so a slice of the
//! received buffer is already the list of hashes. Nothing is copied or decoded
//! until a hash is looked at.

/// A list of block hashes, borrowed as little-endian bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedHashes<'a>(&'a [[u8; 8]]);

impl<'a> PackedHashes<'a> {
    /// The hashes in `bytes`; `None` if the length is not a multiple of eight.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let (hashes, rest) = bytes.as_chunks::<8>();
        rest.is_empty().then_some(PackedHashes(hashes))
    }

    /// Number of hashes.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The first `count` hashes, or all if there are fewer.
    #[must_use]
    pub fn first(self, count: usize) -> Self {
        PackedHashes(&self.0[..count.min(self.0.len())])
    }

    /// The hash at `position`, if there is one.
    pub fn get(self, position: usize) -> Option<i64> {
        self.0.get(position).map(|bytes| i64::from_le_bytes(*bytes))
    }

    /// The hashes in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = i64> + Clone + 'a {
        self.0.iter().map(|bytes| i64::from_le_bytes(*bytes))
    }

    /// The hashes as they stand on the wire.
    pub fn as_bytes(self) -> &'a [[u8; 8]] {
        self.0
    }

    /// Packs `hashes` into bytes that [`PackedHashes::new`] takes.
    pub fn pack(hashes: &[i64]) -> Vec<u8> {
        hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_and_reads_back() {
        let hashes = [0, 1, -1, i64::MIN, i64::MAX];
        let bytes = PackedHashes::pack(&hashes);
        let packed = PackedHashes::new(&bytes).expect("a multiple of eight");
        assert!(packed.iter().eq(hashes));
        assert_eq!(packed.first(2).len(), 2);
        assert_eq!(packed.first(9).len(), hashes.len());
        assert_eq!(packed.get(3), Some(i64::MIN));
        assert_eq!(packed.get(5), None);
    }

    #[test]
    fn a_ragged_length_is_refused() {
        for length in 1..8 {
            assert_eq!(PackedHashes::new(&[0; 16][..8 + length]), None, "length {length}");
        }
        assert!(PackedHashes::new(&[]).is_some_and(PackedHashes::is_empty));
    }
}
