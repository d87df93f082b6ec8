//! Having cache lines fetched before they are read.
//!
//! A look-up in a large table waits for memory twice or three times. A load that misses holds up
//! all that comes after it once the processor's buffer of instructions under way is
//! full, after a dozen look-ups; a prefetch does not, so that as many are under way as the memory
//! can serve.

/// Has the line at `place` fetched, without waiting for it.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn fetch<T: Copy>(place: &T) {
    safe_arch::prefetch_t0(place);
}

/// The same by reading it, which waits: there is no safe prefetch for this processor.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(super) fn fetch<T: Copy>(place: &T) {
    std::hint::black_box(*place);
}
