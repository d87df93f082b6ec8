//! Bytes of messages on their way, bounded over all connections.
//!
//! A connection may have 64 calls of 8 MiB each, and there may be many connections,
//! so what is received is charged to one budget for the process, from a message's
//! first byte until its call is answered, and an answer from then on until its bytes
//! are on the wire. A message that does not fit is refused with `RESOURCE_EXHAUSTED`,
//! which routers and bridges take for overload. An answer always fits, as the work is
//! done: it keeps others out instead.
//!
//! A message must also come whole in time, see `received`, so that nobody holds a part
//! of the budget by sending slowly; and answers must be taken, see `watch`.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use super::observe::{Recorder, Refused};
use super::watch::{Answer, Watch};

/// Most bytes that calls other than the index's may send: probes and reflection, whose
/// streams may stay open.
pub(super) const OTHER_BYTES_MAX: usize = 64 * 1024;

/// Answers below this are not charged: 64 calls on each of 1,024 connections are as much
/// as the default budget, and most answers cost no allocation more.
const ANSWER_BYTES_MIN: usize = 8 * 1024;

/// What may be on its way at once.
#[derive(Debug)]
pub(super) struct Budget {
    recorder: Arc<Recorder>,
    max: usize,
    // A sum that orders nothing, so `Relaxed` is enough.
    used: AtomicUsize,
}

impl Budget {
    /// A budget of `max` bytes that tells the recorder of what does not fit.
    pub(super) fn new(max: usize, recorder: Arc<Recorder>) -> Self {
        Budget { recorder, max, used: AtomicUsize::new(0) }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Bytes charged now.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let fits = self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= self.max;
        if !fits {
            self.give_back(bytes);
        }
        fits
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What one call has been charged; given back when nobody holds its message any more.
#[derive(Debug)]
pub(super) struct Charge {
    budget: Arc<Budget>,
    bytes: AtomicUsize,
    /// Most that this call may be charged.
    max: usize,
}

impl Charge {
    pub(super) fn new(budget: Arc<Budget>, max: usize) -> Arc<Self> {
        Arc::new(Charge { budget, bytes: AtomicUsize::new(0), max })
    }

    /// The charge of a request; whoever works on its message keeps it.
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Option<Arc<Self>> {
        request.extensions().get().cloned()
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    /// They do not fit; this is counted and told of here.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Status> {
        let is_within = self.bytes.load(Ordering::Relaxed).saturating_add(bytes) <= self.max;
        if is_within && self.budget.take(bytes) {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            return Ok(());
        }
        let text = "the messages on their way take all the memory there is for them";
        self.budget.recorder.refused(Refused::Memory, &text);
        Err(Status::resource_exhausted(text))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give_back(*self.bytes.get_mut());
    }
}

/// The body of an answer, charged until its bytes are on the wire.
pub(super) struct Sent {
    body: tonic::body::Body,
    budget: Arc<Budget>,
    watch: Arc<Watch>,
}

impl Sent {
    pub(super) fn new(body: tonic::body::Body, budget: Arc<Budget>, watch: Arc<Watch>) -> Self {
        Sent { body, budget, watch }
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let charged = |data: Bytes| match data.len() {
            0..ANSWER_BYTES_MIN => data,
            _ => Bytes::from_owner(Owned::new(data, Arc::clone(&self.budget), self.watch.answer())),
        };
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(charged))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes of an answer, dropped by the connection when they are sent.
struct Owned {
    data: Bytes,
    budget: Arc<Budget>,
    _answer: Answer,
}

impl Owned {
    fn new(data: Bytes, budget: Arc<Budget>, answer: Answer) -> Self {
        budget.used.fetch_add(data.len(), Ordering::Relaxed);
        Owned { data, budget, _answer: answer }
    }
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.budget.give_back(self.data.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_charged_and_all_comes_back() {
        let budget = Arc::new(Budget::new(100, Arc::new(Recorder::new())));
        let first = Charge::new(Arc::clone(&budget), 80);
        assert!(first.take(50).is_ok() && first.take(30).is_ok());
        assert!(first.take(1).is_err(), "past its own bound");
        let second = Charge::new(Arc::clone(&budget), 80);
        assert!(second.take(20).is_ok());
        assert!(second.take(1).is_err(), "past the budget");
        assert_eq!(budget.used(), 100);
        drop(first);
        assert!(second.take(60).is_ok());
        assert_eq!(budget.used(), 80);
        // An answer always fits, and keeps others out.
        let watch = Arc::new(Watch::default());
        let answer = Owned::new(Bytes::from(vec![0; 90]), Arc::clone(&budget), watch.answer());
        assert_eq!(budget.used(), 170);
        drop(second);
        assert!(Charge::new(Arc::clone(&budget), 80).take(11).is_err());
        drop(answer);
        assert_eq!(budget.used(), 0);
    }
}
