//! Which service a call goes to, by its path.
//!
//! Calls of the index come first and cost one comparison of a prefix. Everything
//! else, probes and reflection, is asked for a few times a minute at most, so it
//! stands in a list behind functions of one type. A path of nobody goes to the
//! index's service, which answers `UNIMPLEMENTED`.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Request, Response};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

/// Answers a call; never fails, as an error is an answer too.
type Answering<B> = Arc<dyn Fn(Request<B>) -> BoxFuture<Response<Body>, Infallible> + Send + Sync>;

/// The index's service `S` and others, for requests with bodies of `B`.
pub(super) struct Routes<S, B> {
    index: S,
    others: Arc<[(&'static str, Answering<B>)]>,
}

// By hand, as a derived one would ask for bodies that can be cloned.
impl<S: Clone, B> Clone for Routes<S, B> {
    fn clone(&self) -> Self {
        Routes { index: self.index.clone(), others: Arc::clone(&self.others) }
    }
}

impl<S, B> Routes<S, B>
where
    S: NamedService,
{
    pub(super) fn new(index: S, others: impl IntoIterator<Item = Other<B>>) -> Self {
        Routes { index, others: others.into_iter().map(|Other(name, answer)| (name, answer)).collect() }
    }
}

/// A service that is asked for rarely.
pub(super) struct Other<B>(&'static str, Answering<B>);

impl<B: Send + 'static> Other<B> {
    pub(super) fn new<S>(service: S) -> Self
    where
        S: Service<
                Request<B>,
                Response = Response<Body>,
                Error = Infallible,
                Future = BoxFuture<Response<Body>, Infallible>,
            > + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
    {
        // tonic's generated services are always ready.
        Other(S::NAME, Arc::new(move |request| service.clone().call(request)))
    }
}

/// Whether `path` is `/SERVICE/METHOD`.
fn is_of(service: &str, path: &str) -> bool {
    let rest = path.strip_prefix('/').and_then(|path| path.strip_prefix(service));
    rest.is_some_and(|rest| rest.starts_with('/'))
}

impl<S, B> hyper::service::Service<Request<B>> for Routes<S, B>
where
    S: Service<
            Request<B>,
            Response = Response<Body>,
            Error = Infallible,
            Future = BoxFuture<Response<Body>, Infallible>,
        > + NamedService
        + Clone,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn call(&self, request: Request<B>) -> Self::Future {
        let path = request.uri().path();
        if !is_of(S::NAME, path)
            && let Some((_, answer)) = self.others.iter().find(|(name, _)| is_of(name, path))
        {
            return answer(request);
        }
        // Cloning one of tonic's services counts a reference.
        self.index.clone().call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_named_whole() {
        assert!(is_of("a.B", "/a.B/C"));
        for path in ["", "/", "a.B/C", "/a.B", "/a.BC/D", "/a.b/C", "/x.a.B/C"] {
            assert!(!is_of("a.B", path), "{path}");
        }
    }
}
