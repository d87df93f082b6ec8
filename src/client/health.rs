//! Which endpoint to ask first.
//!
//! Endpoints stand in their configured order. One that failed goes to the end until
//! it may be tried again, after a wait that doubles with each failure; then one
//! query tries it in its place, and the others wait for what becomes of that. All
//! of it is a few numbers over moments that the caller passes in.

use std::time::Instant;

use smallvec::SmallVec;

use crate::limits::RECONNECT_BACKOFF;

/// Numbers of endpoints, in the order to ask them.
pub(super) type Order = SmallVec<[usize; 4]>;

/// How all endpoints of a client do.
#[derive(Debug)]
pub(super) struct Health {
    endpoints: Vec<State>,
}

#[derive(Debug, Clone, Default)]
struct State {
    failures: u32,
    /// When it may be tried again. Invariant: there is one exactly if it has failed.
    retry_at: Option<Instant>,
}

impl State {
    /// The wait after this many failures in a row.
    fn put_off(&mut self, now: Instant) {
        let (first, longest) = RECONNECT_BACKOFF;
        let doubled = first.saturating_mul(1 << self.failures.saturating_sub(1).min(16));
        self.retry_at = Some(now + doubled.min(longest));
    }
}

impl Health {
    /// All `count` endpoints are healthy until they fail.
    pub(super) fn new(count: usize) -> Self {
        Health { endpoints: vec![State::default(); count] }
    }

    /// Every endpoint, in the order to ask them. One that may be tried again is this query's to try.
    pub(super) fn order(&mut self, now: Instant) -> Order {
        let mut order: Order = (0..self.endpoints.len()).collect();
        order.sort_by_key(|&number| self.endpoints[number].retry_at.filter(|at| *at > now));
        let first = &mut self.endpoints[order[0]];
        if first.retry_at.is_some() {
            first.put_off(now);
        }
        order
    }

    /// The endpoint answered.
    pub(super) fn answered(&mut self, number: usize) {
        self.endpoints[number] = State::default();
    }

    /// The endpoint did not answer.
    pub(super) fn failed(&mut self, number: usize, now: Instant) {
        let state = &mut self.endpoints[number];
        state.failures = state.failures.saturating_add(1);
        state.put_off(now);
    }

    /// Failures since the endpoint last answered.
    pub(super) fn failures(&self, number: usize) -> u32 {
        self.endpoints[number].failures
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FIRST: Duration = RECONNECT_BACKOFF.0;

    #[track_caller]
    fn check(health: &mut Health, now: Instant, expected: &[usize]) {
        assert_eq!(health.order(now)[..], *expected);
    }

    #[test]
    fn healthy_endpoints_stand_as_configured_and_failed_ones_behind() {
        let (mut health, now) = (Health::new(3), Instant::now());
        check(&mut health, now, &[0, 1, 2]);
        health.failed(0, now);
        check(&mut health, now, &[1, 2, 0]);
        health.failed(1, now + FIRST / 2);
        check(&mut health, now + FIRST / 2, &[2, 0, 1]);
        health.answered(1);
        check(&mut health, now + FIRST / 2, &[1, 2, 0]);
    }

    #[test]
    fn one_query_tries_a_failed_endpoint_when_its_time_comes() {
        let (mut health, now) = (Health::new(2), Instant::now());
        health.failed(0, now);
        check(&mut health, now + FIRST - Duration::from_millis(1), &[1, 0]);
        let due = now + FIRST;
        check(&mut health, due, &[0, 1]);
        check(&mut health, due, &[1, 0]);
        health.answered(0);
        check(&mut health, due, &[0, 1]);
        check(&mut health, due, &[0, 1]);
        assert_eq!(health.failures(0), 0);
    }

    #[test]
    fn the_wait_doubles_up_to_its_longest() {
        let (mut health, mut now) = (Health::new(2), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..40 {
            health.failed(0, now);
            let at = health.endpoints[0].retry_at.expect("failed");
            waits.push(at - now);
            now = at;
        }
        assert_eq!(waits[..3], [FIRST, FIRST * 2, FIRST * 4]);
        assert!(waits.is_sorted());
        assert_eq!(waits.last(), Some(&RECONNECT_BACKOFF.1));
        assert_eq!(health.failures(0), 40);
    }

    #[test]
    fn with_everyone_gone_everyone_is_still_asked() {
        let (mut health, now) = (Health::new(2), Instant::now());
        health.failed(1, now);
        health.failed(0, now + Duration::from_millis(1));
        check(&mut health, now + Duration::from_millis(2), &[1, 0]);
    }
}
