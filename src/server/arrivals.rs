//! Each call as it arrives: may it go on, until when, and what it takes.
//!
//! This runs in the connection's own task when a call's headers have been read. In
//! order: the clock of a deadline starts, what the call shows is checked, and its
//! body is charged from the first byte. The call is then polled against its
//! deadline, and its answer recorded and charged until it is sent.
//!
//! Cost: about a dozen references counted and three allocations, of which one is for
//! a deadline; no lock.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::{Code, Status};
use tracing::Span;

use super::admission::{Admission, Deadline};
use super::instance::Instance;
use super::memory::{Budget, Charge, OTHER_BYTES_MAX, Sent};
use super::observe::{Method, Recorder, Refused, Running};
use super::received::Received;
use super::security::{Denied, Gate, Grants};
use super::trace;
use super::watch::{Call, Watch};

/// What all connections of a server go through.
#[derive(Debug)]
pub(super) struct Doors {
    pub(super) admission: Arc<Admission>,
    pub(super) recorder: Arc<Recorder>,
    pub(super) budget: Arc<Budget>,
    pub(super) gate: Arc<Gate>,
    /// Whether calls run in spans that carry their callers' trace context.
    pub(super) traces: bool,
    /// What every answer says of the server.
    pub(super) instance: Instance,
}

impl Doors {
    /// Whether the call may go on; refusals are counted.
    fn check(&self, method: Method, headers: &HeaderMap, grants: Grants) -> Result<(), Denied> {
        self.gate.check(method, headers, grants).inspect_err(|denied| {
            let why = match denied {
                Denied::Unknown => Refused::Unauthenticated,
                Denied::NotAllowed => Refused::NotAllowed,
            };
            self.recorder.refused(why, denied);
        })
    }

    /// The call with a body that is bounded as its method asks.
    fn charge(&self, method: Method, mut request: Request<Incoming>) -> Request<Received> {
        let is_index = !matches!(method, Method::Admin | Method::Other);
        let max = if is_index { usize::MAX } else { OTHER_BYTES_MAX };
        let charge = Charge::new(Arc::clone(&self.budget), max);
        request.extensions_mut().insert(Arc::clone(&charge));
        request.map(|body| Received::new(body, charge, is_index))
    }
}

/// Takes the calls of one connection.
#[derive(Debug, Clone)]
pub(super) struct Arrivals<S> {
    inner: S,
    doors: Arc<Doors>,
    /// Counts of this connection.
    watch: Arc<Watch>,
    /// What the certificate of this connection's client allows.
    grants: Grants,
}

impl<S> Arrivals<S> {
    /// For a connection whose client shows no certificate.
    pub(super) fn new(inner: S, doors: Arc<Doors>) -> Self {
        Arrivals { inner, doors, watch: Arc::default(), grants: Grants::default() }
    }

    /// The same for one connection, whose client's certificate allows this.
    pub(super) fn of(self, watch: Arc<Watch>, grants: Grants) -> Self {
        Arrivals { watch, grants, ..self }
    }

    /// What all connections go through.
    pub(super) fn doors(&self) -> &Doors {
        &self.doors
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
            _ => Deadline::NEVER,
        };
        let span = match self.doors.traces {
            true => trace::span(method, request.headers()),
            false => Span::none(),
        };
        request.extensions_mut().insert(deadline);
        let call = match self.doors.check(method, request.headers(), self.grants) {
            Ok(()) => self.inner.call(self.doors.charge(method, request)),
            Err(denied) => {
                let answer = Status::from(denied).into_http();
                Box::pin(std::future::ready(Ok(answer)))
            }
        };
        Timed::new(call, method, deadline, Arc::clone(&self.doors), &self.watch, span)
    }
}

/// A call that is answered by its deadline, whether its body came or not.
pub(super) struct Timed {
    call: BoxFuture<Response<Body>, Infallible>,
    deadline: Deadline,
    /// Wakes the call at its deadline.
    alarm: Option<Pin<Box<Sleep>>>,
    doors: Arc<Doors>,
    watched: Call,
    running: Running,
    span: Span,
}

impl Timed {
    fn new(
        call: BoxFuture<Response<Body>, Infallible>,
        method: Method,
        deadline: Deadline,
        doors: Arc<Doors>,
        watch: &Arc<Watch>,
        span: Span,
    ) -> Self {
        let alarm = deadline.at().map(|deadline| Box::pin(sleep_until(deadline)));
        let running = Running::begin(Arc::clone(&doors.recorder), method);
        Timed { call, deadline, alarm, doors, watched: watch.call(), running, span }
    }

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
        Poll::Ready(Status::from(self.doors.admission.refuse_late()).into_http())
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
        let (budget, watch) = (Arc::clone(&self.doors.budget), self.watched.watch());
        Poll::Ready(Ok(response.map(|body| Body::new(Sent::new(body, budget, watch)))))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// What a call that takes `ready_after` and may take `timeout` is answered, and the late count.
    async fn answered(timeout: Duration, ready_after: Duration) -> (Response<Body>, u64) {
        let recorder = Arc::new(Recorder::new());
        let admission = Arc::new(Admission::new(1));
        let (gate, budget) = (Arc::new(Gate::default()), Arc::new(Budget::new(0, Arc::clone(&recorder))));
        let instance = Instance::random();
        let doors = Doors { admission, recorder, budget, gate, traces: false, instance };
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", format!("{}m", timeout.as_millis()).parse().expect("a value"));
        let deadline = Deadline::new(Instant::now(), &headers);
        let call = Box::pin(async move {
            tokio::time::sleep(ready_after).await;
            Ok(Response::new(Body::empty()))
        });
        let doors = Arc::new(doors);
        let watch = Arc::new(Watch::default());
        let timed = Timed::new(call, Method::MatchPrefix, deadline, Arc::clone(&doors), &watch, Span::none());
        let Ok(response) = timed.await;
        (response, doors.admission.late())
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
