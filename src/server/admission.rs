//! Who may scan: deadlines counted from arrival, and permits.
//!
//! A prefix query is worth nothing once its caller has given up, and worth
//! little when it has to wait, as the caller then routes by load. So both are
//! refused early and cheaply, and nothing queues.
//!
//! The deadline runs from the moment the request's headers were read off the
//! connection: `arrivals` runs in the connection's own task, which never
//! scans. It is looked at on every step of the call, so a query whose body comes
//! too late, or never, is answered in time, and once more just before the scan,
//! when the lock has been waited for.
//!
//! A permit is taken when the body is complete and valid, and then, where more
//! queries have arrived and are not answered than there are permits, the call
//! yields once. Without that, no more permits could ever be out than the runtime
//! has threads, and the limit would never bite. The runtime wakes a task that
//! yielded only after it ran what was runnable and polled its sockets, so the
//! queries that have arrived by then are admitted or refused before this one
//! scans. Under load the permits out are thus the queries waiting for a core. Where
//! all that have arrived could be admitted there is nothing to wait for, and a
//! look at the sockets between any two calls would cost each a system call.
//!
//! This must not know messages, the index or what a scan is.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Most permits there can be.
pub(super) const PERMITS_MAX: usize = Semaphore::MAX_PERMITS;

/// Hands out permits to scan, and counts what became of prefix queries.
#[derive(Debug)]
pub struct Admission {
    permits: Arc<Semaphore>,
    limit: usize,
    // Statistics: each is read alone and orders nothing, so `Relaxed` is enough.
    scans: AtomicU64,
    overloaded: AtomicU64,
    late: AtomicU64,
}

/// The right to one scan; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    _slot: OwnedSemaphorePermit,
}

/// Why a prefix query was not scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// All permits are out.
    Overloaded {
        /// How many there are.
        limit: usize,
    },
    /// The caller's time ran out.
    Late,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Overloaded { limit } => write!(f, "all {limit} prefix queries that may run are running"),
            Refusal::Late => write!(f, "the deadline passed before the query was scanned"),
        }
    }
}

impl std::error::Error for Refusal {}

impl Admission {
    /// Hands out up to `limit` permits, or as many as a semaphore has.
    pub fn new(limit: usize) -> Self {
        let limit = limit.min(PERMITS_MAX);
        Admission {
            permits: Arc::new(Semaphore::new(limit)),
            limit,
            scans: AtomicU64::new(0),
            overloaded: AtomicU64::new(0),
            late: AtomicU64::new(0),
        }
    }

    /// A permit if one is left; never waits.
    ///
    /// # Errors
    /// All permits are out; this is counted and logged here.
    pub fn admit(&self) -> Result<Permit, Refusal> {
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(slot) => Ok(Permit { _slot: slot }),
            Err(_) => {
                let total = count(&self.overloaded);
                if is_logged(total) {
                    tracing::warn!(total, limit = self.limit, "prefix queries refused: all permits are out");
                }
                Err(Refusal::Overloaded { limit: self.limit })
            }
        }
    }

    /// Counts and logs a query whose deadline passed.
    pub(super) fn refuse_late(&self) -> Refusal {
        let total = count(&self.late);
        if is_logged(total) {
            tracing::info!(total, "prefix queries shed: their deadline passed");
        }
        Refusal::Late
    }

    /// Counts a scan that starts.
    pub(super) fn scanning(&self) {
        count(&self.scans);
    }

    /// How many permits there are.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How many permits are out.
    pub fn running(&self) -> usize {
        self.limit - self.permits.available_permits()
    }

    /// Scans started so far.
    pub fn scans(&self) -> u64 {
        self.scans.load(Ordering::Relaxed)
    }

    /// Prefix queries refused so far because all permits were out.
    pub fn overloaded(&self) -> u64 {
        self.overloaded.load(Ordering::Relaxed)
    }

    /// Prefix queries shed so far because their deadline had passed.
    pub fn late(&self) -> u64 {
        self.late.load(Ordering::Relaxed)
    }
}

/// The new total.
fn count(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::Relaxed) + 1
}

/// Whether a rejection is logged at this total of its class: 1, 2, 4, 8, …
fn is_logged(total: u64) -> bool {
    total.is_power_of_two()
}

/// When a call's answer is of no more use; `None` is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline.
    pub(super) const NEVER: Deadline = Deadline(None);

    /// When it is, if ever.
    pub(super) fn at(self) -> Option<Instant> {
        self.0
    }

    pub(super) fn new(arrival: Instant, headers: &HeaderMap) -> Self {
        // One past the end of time is none.
        Deadline(grpc_timeout(headers).and_then(|timeout| arrival.checked_add(timeout)))
    }

    /// The deadline that `arrivals` put on a request.
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get().copied().unwrap_or(Deadline(None))
    }

    pub(super) fn has_passed(self) -> bool {
        self.0.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Whether it has passed at `now`.
    pub(super) fn has_passed_at(self, now: std::time::Instant) -> bool {
        self.0.is_some_and(|deadline| now >= deadline.into_std())
    }
}

/// The `grpc-timeout` of a call: at most eight digits and a unit.
///
/// A malformed one counts as none, as in gRPC's own C++ core and in tonic: the
/// call is answered, and nobody is worse off than without the header. Zero has
/// run out on arrival.
fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    const DIGITS_MAX: usize = 8;
    let (unit, digits) = headers.get("grpc-timeout")?.as_bytes().split_last()?;
    if digits.is_empty() || digits.len() > DIGITS_MAX || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(count * 3600)),
        b'M' => Some(Duration::from_secs(count * 60)),
        b'S' => Some(Duration::from_secs(count)),
        b'm' => Some(Duration::from_millis(count)),
        b'u' => Some(Duration::from_micros(count)),
        b'n' => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(value: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", value.parse().expect("a header value"));
        grpc_timeout(&headers)
    }

    #[test]
    fn timeouts_of_every_unit_are_read() {
        let cases = [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("3S", Duration::from_secs(3)),
            ("100m", Duration::from_millis(100)),
            ("00000007u", Duration::from_micros(7)),
            ("99999999n", Duration::from_nanos(99_999_999)),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
            ("0S", Duration::ZERO),
        ];
        for (value, expected) in cases {
            assert_eq!(timeout(value), Some(expected), "{value}");
        }
    }

    #[test]
    fn a_malformed_timeout_is_none() {
        for value in ["", "S", "1", "123456789S", "1s", "-1S", "+1S", " 1S", "1.5S", "1S ", "١S", "1mS"] {
            assert_eq!(timeout(value), None, "{value:?}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
    }

    #[test]
    fn permits_come_back() {
        let admission = Admission::new(2);
        let held = [admission.admit(), admission.admit()].map(Result::unwrap);
        assert_eq!(admission.admit().unwrap_err(), Refusal::Overloaded { limit: 2 });
        drop(held);
        assert!(admission.admit().is_ok());
        assert_eq!(admission.overloaded(), 1);
    }

    #[test]
    fn rejections_are_logged_at_powers_of_two() {
        let logged: Vec<u64> = (1..=20).filter(|&total| is_logged(total)).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16]);
    }
}
