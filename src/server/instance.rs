//! Which life of which server this is, said in every answer.
//!
//! A server starts with an empty index. A client that reports to it has to know
//! whether the server that answers is still the one that took its earlier reports,
//! even if address and connection stayed: a proxy or a service address may lead
//! to another one. So each server draws an id as it starts, and [`Stamped`] puts it
//! into the initial metadata of each answer of each service, an error's too. It
//! stands outside of everything else, so that no answer leaves without it.
//!
//! Cost per call: a header of 32 bytes that is counted, not copied.

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue, Request, Response};
use tonic::metadata::MetadataMap;

/// The metadata that carries the id; in a request, the id of the server that is meant.
const HEADER: HeaderName = HeaderName::from_static("kv-indexer-instance");

/// The id of one life of a server: 128 random bits, as 32 digits of lower-case hex.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Instance(HeaderValue);

impl Instance {
    /// An id that no other server has, nor this one after a restart.
    pub(super) fn random() -> Self {
        // Keys come from the system's generator; a clock could repeat itself.
        let keys = RandomState::new();
        let text = format!("{:016x}{:016x}", keys.hash_one(1u8), keys.hash_one(2u8));
        Instance(HeaderValue::from_str(&text).unwrap_or_else(|_| unreachable!("hex is a header's value")))
    }

    /// Whether a request names this instance.
    pub(super) fn is_meant_by(&self, metadata: &MetadataMap) -> bool {
        metadata.get(HEADER.as_str()).is_some_and(|named| named.as_bytes() == self.0.as_bytes())
    }

    /// Its 32 digits.
    pub(super) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A service all of whose answers say which server gave them.
#[derive(Debug, Clone)]
pub(super) struct Stamped<S> {
    inner: S,
    instance: Instance,
}

impl<S> Stamped<S> {
    pub(super) fn new(inner: S, instance: Instance) -> Self {
        Stamped { inner, instance }
    }
}

impl<S, B, A> hyper::service::Service<Request<B>> for Stamped<S>
where
    S: hyper::service::Service<Request<B>, Response = Response<A>>,
    S::Future: Unpin,
{
    type Response = Response<A>;
    type Error = S::Error;
    type Future = Stamping<S::Future>;

    fn call(&self, request: Request<B>) -> Self::Future {
        Stamping { call: self.inner.call(request), instance: self.instance.clone() }
    }
}

/// A call whose answer will be stamped.
#[derive(Debug)]
pub(super) struct Stamping<F> {
    call: F,
    instance: Instance,
}

impl<F, A, E> Future for Stamping<F>
where
    F: Future<Output = Result<Response<A>, E>> + Unpin,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.call).poll(context);
        answer.map_ok(|mut response| {
            response.headers_mut().insert(HEADER, self.instance.0.clone());
            response
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_128_bits_of_hex_and_differ() {
        let ids: Vec<Instance> = std::iter::repeat_with(Instance::random).take(100).collect();
        for (place, id) in ids.iter().enumerate() {
            let text = id.as_str();
            assert!(text.len() == 32 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')), "{text}");
            assert!(!ids[..place].contains(id), "{text} came twice");
        }
        // Neither half may be the same in all of them.
        for half in [0..16, 16..32] {
            assert_ne!(ids[0].as_str()[half.clone()], ids[1].as_str()[half]);
        }
    }
}
