//! Who may scan: deadlines counted from arrival, and permits.
//!
//! A prefix query is worth nothing once its caller has given up, and worth
//! little when it has to wait, as the caller then routes by load. So both are
//! refused early and cheaply, and nothing queues.
//!
//! The deadline runs from the moment the request's headers were read off the
//! connection: [`Arrivals`] is called by the connection's own task, which never
//! scans. It is looked at on every step of the call, so a query whose body comes
//! too late, or never, is answered in time, and once more just before the scan,
//! when the lock has been waited for.
//!
//! A permit is taken when the body is complete and valid, and then the call
//! yields once. Without that, no more permits could ever be out than the runtime
//! has threads, and the limit would never bite. The runtime wakes a task that
//! yielded only after it ran what was runnable and polled its sockets, so the
//! queries that have arrived by then are admitted or refused before this one
//! scans. Under load the permits out are thus the queries waiting for a core.
//!
//! This must not know messages, the index or what a scan is.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::{Code, Status};
use tracing::Span;

use super::memory::{Budget, Charge, OTHER_BYTES_MAX, Received, Sent};
use super::observe::{Method, Recorder, Refused, Running};
use super::security::{Denied, Gate, Grants};
use super::trace;
use super::watch::{Call, Watch};

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
    fn new(arrival: Instant, headers: &HeaderMap) -> Self {
        // One past the end of time is none.
        Deadline(grpc_timeout(headers).and_then(|timeout| arrival.checked_add(timeout)))
    }

    /// The deadline that [`Arrivals`] put on a request.
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get().copied().unwrap_or(Deadline(None))
    }

    pub(super) fn has_passed(self) -> bool {
        self.0.is_some_and(|deadline| Instant::now() >= deadline)
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

/// Stamps each prefix query as its headers arrive and holds it to its deadline.
#[derive(Debug, Clone)]
pub(super) struct Arrivals<S> {
    inner: S,
    admission: Arc<Admission>,
    recorder: Arc<Recorder>,
    budget: Arc<Budget>,
    /// Counts of this connection.
    watch: Arc<Watch>,
    gate: Arc<Gate>,
    /// What the certificate of this connection's client allows.
    grants: Grants,
    traces: bool,
}

impl<S> Arrivals<S> {
    /// With `traces`, calls run in spans that carry their callers' trace context.
    pub(super) fn new(
        inner: S,
        admission: Arc<Admission>,
        recorder: Arc<Recorder>,
        budget: Arc<Budget>,
        gate: Arc<Gate>,
        traces: bool,
    ) -> Self {
        let watch = Arc::new(Watch::default());
        Arrivals { inner, admission, recorder, budget, watch, gate, grants: Grants::default(), traces }
    }

    /// The same for one connection, whose client's certificate allows this.
    pub(super) fn of(self, watch: Arc<Watch>, grants: Grants) -> Self {
        Arrivals { watch, grants, ..self }
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The call with a body that is bounded as its method asks.
    fn charge(&self, method: Method, mut request: Request<Incoming>) -> Request<Received> {
        let is_index = !matches!(method, Method::Admin | Method::Other);
        let max = if is_index { usize::MAX } else { OTHER_BYTES_MAX };
        let charge = Charge::new(Arc::clone(&self.budget), max);
        request.extensions_mut().insert(Arc::clone(&charge));
        request.map(|body| Received::new(body, charge, Arc::clone(&self.recorder), is_index))
    }

    fn refuse(&self, denied: Denied) -> Status {
        let why = match denied {
            Denied::Unknown => Refused::Unauthenticated,
            Denied::NotAllowed => Refused::NotAllowed,
        };
        self.recorder.refused(why, &denied);
        denied.into()
    }
}

impl<S> hyper::service::Service<Request<Incoming>> for Arrivals<S>
where
    S: hyper::service::Service<
            Request<Received>,
            Response = Response<Body>,
            Error = Infallible,
            Future = BoxFuture<Response<Body>, Infallible>,
        >,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Timed;

    fn call(&self, mut request: Request<Incoming>) -> Timed {
        let method = Method::of(request.uri().path());
        // The only call that is ever refused for lateness or load.
        let deadline = match method {
            Method::MatchPrefix => Deadline::new(Instant::now(), request.headers()),
            _ => Deadline(None),
        };
        let running = Running::begin(Arc::clone(&self.recorder), method);
        let span = if self.traces { trace::span(method, request.headers()) } else { Span::none() };
        let allowed = self.gate.check(method, request.headers(), self.grants);
        request.extensions_mut().insert(deadline);
        let call = match allowed {
            Ok(()) => self.inner.call(self.charge(method, request)),
            Err(denied) => {
                let answer = self.refuse(denied).into_http();
                Box::pin(std::future::ready(Ok(answer)))
            }
        };
        let alarm = deadline.0.map(|deadline| Box::pin(sleep_until(deadline)));
        Timed {
            call,
            deadline,
            alarm,
            admission: Arc::clone(&self.admission),
            budget: Arc::clone(&self.budget),
            watched: (self.watch.call(), Arc::clone(&self.watch)),
            running,
            span,
        }
    }
}

/// A call that is answered by its deadline, whether its body came or not.
pub(super) struct Timed {
    call: BoxFuture<Response<Body>, Infallible>,
    deadline: Deadline,
    /// Wakes the call at its deadline.
    alarm: Option<Pin<Box<Sleep>>>,
    admission: Arc<Admission>,
    budget: Arc<Budget>,
    watched: (Call, Arc<Watch>),
    running: Running,
    span: Span,
}

impl Timed {
    fn poll_call(&mut self, context: &mut Context<'_>) -> Poll<Response<Body>> {
        // The clock comes first, so that what is late is not even decoded.
        if !self.deadline.has_passed() {
            if let Poll::Ready(Ok(response)) = self.call.as_mut().poll(context) {
                return Poll::Ready(response);
            }
            match self.alarm.as_mut().map(|alarm| alarm.as_mut().poll(context)) {
                Some(Poll::Ready(())) => {}
                Some(Poll::Pending) | None => return Poll::Pending,
            }
        }
        Poll::Ready(Status::from(self.admission.refuse_late()).into_http())
    }
}

/// The status of an answer whose head is all there is, or `Ok`.
fn code(response: &Response<Body>) -> Code {
    response.headers().get("grpc-status").map_or(Code::Ok, |status| Code::from_bytes(status.as_bytes()))
}

impl Future for Timed {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let span = self.span.clone();
        let _entered = span.enter();
        let Poll::Ready(response) = self.poll_call(context) else { return Poll::Pending };
        let code = code(&response);
        self.running.answered(code);
        if !span.is_none() {
            tracing::debug!(?code, "answered");
        }
        let (_, watch) = &self.watched;
        let (budget, watch) = (Arc::clone(&self.budget), Arc::clone(watch));
        Poll::Ready(Ok(response.map(|body| Body::new(Sent::new(body, budget, watch)))))
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

    /// What a call that takes `ready_after` and may take `timeout` is answered, and the late count.
    async fn answered(timeout: Duration, ready_after: Duration) -> (Response<Body>, u64) {
        let admission = Arc::new(Admission::new(1));
        let deadline = Deadline(Some(Instant::now() + timeout));
        let call = Box::pin(async move {
            tokio::time::sleep(ready_after).await;
            Ok(Response::new(Body::empty()))
        });
        let alarm = deadline.0.map(|deadline| Box::pin(sleep_until(deadline)));
        let (budget, watch) = (Arc::new(Budget::new(0)), Arc::new(Watch::default()));
        let (watched, span) = ((watch.call(), watch), Span::none());
        let running = Running::begin(Arc::new(Recorder::new()), Method::MatchPrefix);
        let timed = Timed {
            call,
            deadline,
            alarm,
            admission: Arc::clone(&admission),
            budget,
            watched,
            running,
            span,
        };
        let Ok(response) = timed.await;
        (response, admission.late())
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_answered_at_its_deadline() {
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(1));
        let (response, late) = answered(long, short).await;
        assert_eq!((response.headers().get("grpc-status"), late), (None, 0));
        for (timeout, ready_after) in [(short, long), (short, short), (Duration::ZERO, Duration::ZERO)] {
            let (response, late) = answered(timeout, ready_after).await;
            let status = response.headers().get("grpc-status").map(|value| value.as_bytes());
            assert_eq!((status, late), (Some(&b"4"[..]), 1), "{timeout:?} {ready_after:?}");
        }
    }
}
