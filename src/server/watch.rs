//! What a connection is worth keeping for.
//!
//! A peer can hold a place among the connections, and memory, without doing any
//! work: by never speaking HTTP/2, by going quiet, or by asking and not reading. Each
//! connection is looked at every [`TICK`] and judged by what happened since. HTTP/2's
//! pings do not help here, as a peer that answers them may do all of the three.
//!
//! This must not know sockets or calls: whoever has them counts here.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Pause between two looks at a connection.
pub(super) const TICK: Duration = Duration::from_secs(10);

/// Looks without a call after which a connection is asked to leave: ten minutes. A client
/// that has something to ask again opens another.
const QUIET_TICKS_MAX: u32 = 60;

/// Looks between which an answer must have been taken: an answer is at least this old, and at
/// most twice, when its connection is cut.
const ANSWER_TICKS: u32 = 3;

/// Bytes that every HTTP/2 client sends at once: the preface and an empty settings frame.
const OPENING_BYTES: u64 = 24 + 9;

/// Counts of one connection.
///
/// Each is read alone and orders nothing, so `Relaxed` is enough.
#[derive(Debug, Default)]
pub(super) struct Watch {
    received: AtomicU64,
    calls: AtomicU64,
    running: AtomicUsize,
    /// Answers on their way, by the age they were born in: even or odd.
    answers: [AtomicUsize; 2],
    age: AtomicUsize,
}

/// A call that runs on the connection.
#[derive(Debug)]
pub(super) struct Call(Arc<Watch>);

impl Call {
    /// The counts of its connection.
    pub(super) fn watch(&self) -> Arc<Watch> {
        Arc::clone(&self.0)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer whose bytes are not all on the wire.
#[derive(Debug)]
pub(super) struct Answer {
    watch: Arc<Watch>,
    age: usize,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.watch.answers[self.age].fetch_sub(1, Ordering::Relaxed);
    }
}

impl Watch {
    /// A call begins.
    pub(super) fn call(self: &Arc<Self>) -> Call {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.running.fetch_add(1, Ordering::Relaxed);
        Call(Arc::clone(self))
    }

    /// An answer goes out.
    pub(super) fn answer(self: &Arc<Self>) -> Answer {
        let age = self.age.load(Ordering::Relaxed) % 2;
        self.answers[age].fetch_add(1, Ordering::Relaxed);
        Answer { watch: Arc::clone(self), age }
    }
}

/// What is to be done with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It goes on.
    Keep,
    /// It is asked to leave.
    Quiet,
    /// Its peer does not speak HTTP/2.
    NotOpened,
    /// Its peer does not take its answers.
    Stalled,
}

/// Judges one connection, look by look.
#[derive(Debug, Default)]
pub(super) struct Judge {
    ticks: u32,
    calls: u64,
    quiet_ticks: u32,
}

impl Judge {
    /// One further look, a [`TICK`] after the last.
    pub(super) fn look(&mut self, watch: &Watch) -> Verdict {
        self.ticks = self.ticks.wrapping_add(1);
        if watch.received.load(Ordering::Relaxed) < OPENING_BYTES {
            return Verdict::NotOpened;
        }
        if self.ticks.is_multiple_of(ANSWER_TICKS) {
            let age = watch.age.load(Ordering::Relaxed);
            // Those of the age before this one.
            if watch.answers[(age + 1) % 2].load(Ordering::Relaxed) > 0 {
                return Verdict::Stalled;
            }
            watch.age.store(age + 1, Ordering::Relaxed);
        }
        let calls = watch.calls.load(Ordering::Relaxed);
        let is_busy = calls != self.calls || watch.running.load(Ordering::Relaxed) > 0;
        self.calls = calls;
        self.quiet_ticks = if is_busy { 0 } else { self.quiet_ticks + 1 };
        if self.quiet_ticks >= QUIET_TICKS_MAX { Verdict::Quiet } else { Verdict::Keep }
    }
}

/// A stream whose received bytes are counted.
pub(super) struct Counted<S> {
    stream: S,
    watch: Arc<Watch>,
}

impl<S> Counted<S> {
    pub(super) fn new(stream: S, watch: Arc<Watch>) -> Self {
        Counted { stream, watch }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        self.watch.received.fetch_add(bytes as u64, Ordering::Relaxed);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that has opened HTTP/2.
    fn opened() -> Arc<Watch> {
        let watch = Arc::new(Watch::default());
        watch.received.store(OPENING_BYTES, Ordering::Relaxed);
        watch
    }

    #[test]
    fn a_peer_that_says_too_little_at_first_is_not_kept() {
        let watch = Watch::default();
        watch.received.store(OPENING_BYTES - 1, Ordering::Relaxed);
        assert_eq!(Judge::default().look(&watch), Verdict::NotOpened);
        assert_eq!(Judge::default().look(&opened()), Verdict::Keep);
    }

    #[test]
    fn a_quiet_connection_is_asked_to_leave_and_a_busy_one_kept() {
        let (watch, mut judge) = (opened(), Judge::default());
        let long = watch.call();
        let kept = (0..2 * QUIET_TICKS_MAX).all(|_| judge.look(&watch) == Verdict::Keep);
        assert!(kept, "a long call");
        drop(long);
        for tick in 1..QUIET_TICKS_MAX {
            assert_eq!(judge.look(&watch), Verdict::Keep, "{tick}");
        }
        drop(watch.call());
        for tick in 0..QUIET_TICKS_MAX {
            assert_eq!(judge.look(&watch), Verdict::Keep, "{tick} after a call");
        }
        assert_eq!(judge.look(&watch), Verdict::Quiet);
    }

    #[test]
    fn an_answer_that_is_not_taken_cuts_its_connection_between_one_and_two_ages() {
        for born in 0..ANSWER_TICKS {
            let (watch, mut judge) = (opened(), Judge::default());
            (0..born).for_each(|_| assert_eq!(judge.look(&watch), Verdict::Keep));
            let answer = watch.answer();
            let kept =
                (0..3 * ANSWER_TICKS).take_while(|_| judge.look(&watch) == Verdict::Keep).count() as u32;
            assert!((ANSWER_TICKS..2 * ANSWER_TICKS).contains(&kept), "born {born}, kept {kept}");
            drop(answer);
        }
    }

    #[test]
    fn a_peer_that_takes_its_answers_is_kept_however_many_there_are() {
        let (watch, mut judge) = (opened(), Judge::default());
        let mut last = watch.answer();
        for _ in 0..10 * ANSWER_TICKS {
            let next = watch.answer();
            drop(std::mem::replace(&mut last, next));
            assert_eq!(judge.look(&watch), Verdict::Keep);
        }
    }
}
