//! The body of a request: charged as it comes, handed on when it is whole.
//!
//! tonic makes room for a message as soon as its head announces a length, and the
//! allocator then touches about a megabyte of eight: a peer who only announces would
//! make the server grow by as much for five bytes. So the pieces of a message are
//! kept as they came, slices of what was read off the connection, and tonic sees the
//! first of them when the last is there. A message of one piece, as most are, passes
//! straight through. One that announces more than is taken passes too, as it is
//! refused by its head.
//!
//! tonic joins pieces in one buffer, and makes room for the announced length behind
//! what it has been given by then. So it is given the head of a larger message alone:
//! given a first piece too, it would make room for that one twice and move it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tonic::Status;

use super::memory::Charge;
use super::wire::BUFFER_BYTES;
use crate::limits::MESSAGE_BYTES_MAX;

/// Longest that a message may take from its call's headers to its last byte.
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(30);

/// Bytes that a piece takes beside its data: its entry, and its head on the wire.
const PIECE_BYTES: usize = 64;

/// Bytes of a message's head: whether it is compressed, and its length, big-endian.
const HEAD_BYTES: usize = 5;

/// The body of a request.
#[derive(Debug)]
pub(super) struct Received<B = Incoming> {
    body: B,
    charge: Arc<Charge>,
    /// The message as far as it has come; `None` where bodies are streams of messages.
    message: Option<Message>,
    /// Pieces to hand on before the body is read any further.
    whole: VecDeque<Frame<Bytes>>,
    /// Made when the body is first waited for; most come with their headers.
    too_late: Option<Pin<Box<Sleep>>>,
    ended: bool,
}

/// The first pieces of a message.
#[derive(Debug, Default)]
struct Message {
    pieces: VecDeque<Frame<Bytes>>,
    head: [u8; HEAD_BYTES],
    bytes: usize,
}

impl Message {
    /// Whether the message is whole with `data`, or need not be waited for.
    fn is_whole_with(&mut self, data: &[u8]) -> bool {
        let rest = self.head.get_mut(self.bytes..).unwrap_or_default();
        rest.iter_mut().zip(data).for_each(|(head, byte)| *head = *byte);
        self.bytes += data.len();
        let [_, length @ ..] = self.head;
        let length = u32::from_be_bytes(length) as usize;
        self.bytes >= HEAD_BYTES && (self.bytes - HEAD_BYTES >= length || length > MESSAGE_BYTES_MAX)
    }
}

impl<B> Received<B> {
    /// With `is_message` the body is one message, which must come in time.
    pub(super) fn new(body: B, charge: Arc<Charge>, is_message: bool) -> Self {
        let message = is_message.then(Message::default);
        Received { body, charge, message, whole: VecDeque::new(), too_late: None, ended: false }
    }

    /// Keeps a piece that does not make the message whole; gives back one that can be handed on.
    fn keep(&mut self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        let Some(message) = &mut self.message else { return Some(frame) };
        let is_whole = frame.data_ref().is_none_or(|data| message.is_whole_with(data));
        if !is_whole {
            message.pieces.push_back(frame);
            return None;
        }
        let is_alone = message.pieces.is_empty() && message.bytes <= BUFFER_BYTES;
        if is_alone {
            // Straight through, without a list of one.
            self.hand_on();
            return Some(frame);
        }
        message.pieces.push_back(frame);
        self.hand_on()
    }

    /// Whatever there is of the message is handed on, and what follows as it comes.
    fn hand_on(&mut self) -> Option<Frame<Bytes>> {
        self.too_late = None;
        let Message { pieces, bytes, .. } = self.message.take()?;
        self.whole = pieces;
        let mut first = self.whole.pop_front()?;
        match first.data_mut() {
            Some(data) if bytes > BUFFER_BYTES && data.len() > HEAD_BYTES => {
                let head = data.split_to(HEAD_BYTES);
                self.whole.push_front(first);
                Some(Frame::data(head))
            }
            _ => Some(first),
        }
    }
}

impl<B> Body for Received<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(frame) = this.whole.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        while !this.ended {
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    let bytes = frame.data_ref().map_or(0, Bytes::len) + PIECE_BYTES;
                    if let Err(status) = this.charge.take(bytes) {
                        return Poll::Ready(Some(Err(status)));
                    }
                    if let Some(frame) = this.keep(frame) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Some(Err(Status::from_error(error.into()))));
                }
                Poll::Ready(None) => {
                    this.ended = true;
                    // A message that ends early is handed on too: tonic says what is wrong with it.
                    return Poll::Ready(this.hand_on().map(Ok));
                }
                Poll::Pending if this.message.is_some() => {
                    let too_late = this.too_late.get_or_insert_with(|| Box::pin(sleep(MESSAGE_TIME_MAX)));
                    ready!(too_late.as_mut().poll(context));
                    let status = Status::deadline_exceeded("the message did not come in time");
                    return Poll::Ready(Some(Err(status)));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        let holds = self.message.as_ref().is_some_and(|message| !message.pieces.is_empty());
        !holds && self.whole.is_empty() && (self.ended || self.body.is_end_stream())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::server::memory::Budget;
    use crate::server::observe::Recorder;

    /// A body that gives pieces one by one, and then ends or says nothing more.
    struct Pieces(VecDeque<Bytes>, bool);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
                None if self.1 => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn budget(max: usize) -> Arc<Budget> {
        Arc::new(Budget::new(max, Arc::new(Recorder::new())))
    }

    fn received(pieces: &[&[u8]], ends: bool, is_message: bool) -> Received<Pieces> {
        let pieces = pieces.iter().map(|piece| Bytes::copy_from_slice(piece)).collect();
        Received::new(Pieces(pieces, ends), Charge::new(budget(1 << 30), usize::MAX), is_message)
    }

    /// What is handed on until nothing comes or the body ends, and which of both it was.
    fn handed_on(body: &mut Received<Pieces>) -> (Vec<Vec<u8>>, bool) {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut pieces = Vec::new();
        loop {
            match Pin::new(&mut *body).poll_frame(&mut context) {
                Poll::Ready(Some(frame)) => {
                    pieces.push(frame.expect("data").into_data().expect("data").to_vec())
                }
                Poll::Ready(None) => return (pieces, true),
                Poll::Pending => return (pieces, false),
            }
        }
    }

    #[tokio::test]
    async fn a_message_is_handed_on_when_it_is_whole() {
        let message = [0, 0, 0, 0, 4, 1, 2, 3, 4];
        for cut in 0..=message.len() {
            let (first, second) = message.split_at(cut);
            let mut whole = received(&[first, second], false, true);
            assert_eq!(handed_on(&mut whole).0.concat(), message, "cut at {cut}");
            if cut < message.len() {
                let mut part = received(&[first], false, true);
                assert_eq!(handed_on(&mut part), (vec![], false), "cut at {cut}");
                let mut early = received(&[first], true, true);
                let (pieces, ended) = handed_on(&mut early);
                assert_eq!((pieces.concat(), ended), (first.to_vec(), true), "cut at {cut}");
            }
        }
    }

    #[tokio::test]
    async fn a_larger_message_is_handed_on_behind_its_head() {
        let body = vec![7; BUFFER_BYTES];
        let length = u32::try_from(body.len()).expect("a length that gRPC has");
        let message = [&[0][..], &length.to_be_bytes(), &body].concat();
        for cut in 0..=message.len() {
            let (first, second) = message.split_at(cut);
            let pieces = handed_on(&mut received(&[first, second], false, true)).0;
            assert_eq!(pieces.concat(), message, "cut at {cut}");
            // The second piece of a head in parts is not worth another rule.
            let is_apart = cut < HEAD_BYTES || pieces[0].len() == HEAD_BYTES;
            assert!(is_apart, "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn what_follows_a_message_comes_as_it_is() {
        let mut body = received(&[&[0, 0, 0, 0, 1, 7], b"more", b"again"], true, true);
        let (pieces, ended) = handed_on(&mut body);
        assert_eq!((pieces.len(), pieces.concat(), ended), (3, b"\0\0\0\0\x01\x07moreagain".to_vec(), true));
        assert!(body.is_end_stream());
    }

    #[tokio::test]
    async fn what_is_refused_by_its_head_and_what_is_a_stream_is_not_kept() {
        let length = u32::try_from(MESSAGE_BYTES_MAX + 1).expect("a length that gRPC has");
        let head = [&[0][..], &length.to_be_bytes()].concat();
        assert_eq!(handed_on(&mut received(&[&head], false, true)).0, [head]);
        assert_eq!(handed_on(&mut received(&[&[0, 0]], false, false)).0, [[0, 0]]);
    }

    #[tokio::test]
    async fn pieces_are_charged_with_what_they_take_beside_their_data() {
        let budget = budget(10 * PIECE_BYTES);
        let pieces = (0..20).map(|_| Bytes::from_static(&[0])).collect();
        let charge = Charge::new(Arc::clone(&budget), usize::MAX);
        let mut body = Received::new(Pieces(pieces, false), charge, false);
        let mut context = Context::from_waker(std::task::Waker::noop());
        let taken = std::iter::from_fn(|| match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(Some(Ok(_))) => Some(()),
            _ => None,
        });
        assert_eq!(taken.count(), 9);
        drop(body);
        assert_eq!(budget.used(), 0);
    }
}
