//! Growing waits between attempts to reach a peer.

use std::time::Duration;

use crate::limits::RECONNECT_BACKOFF;

/// The waits: the first one, then twice the last, up to the longest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { next: RECONNECT_BACKOFF.0 }
    }
}

impl Backoff {
    /// The wait before the next attempt.
    pub(super) fn wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(RECONNECT_BACKOFF.1);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..7).map(|_| backoff.wait().as_millis()).collect();
        assert_eq!(waits, [500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000]);
    }
}
