//! A server that does nothing but take requests and give answers of the right size.
//!
//! The distance from it is what an index costs: connections, HTTP/2 settings and
//! runtime are those of the real server, so that only the handler differs.

use std::convert::Infallible;
use std::future::{Ready, ready};

use bytes::Bytes;
use http::{Request as HttpRequest, Response as HttpResponse};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::{Request, Response, Status};

use super::plan::APPLY;
use crate::client::Raw;
use crate::limits::{MESSAGE_BYTES_MAX, STREAMS_PER_CONNECTION_MAX};

/// The same as the server's windows.
const STREAM_WINDOW_BYTES: u32 = MESSAGE_BYTES_MAX as u32 + 64 * 1024;

/// Serves until it is given up.
pub(super) async fn serve(listener: TcpListener, answer: Bytes) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(2 * STREAM_WINDOW_BYTES)
            .serve_connection(TokioIo::new(stream), Noop { answer: answer.clone() });
        tokio::spawn(async move {
            // A client that leaves in the middle is none of the generator's business.
            let _ = connection.await;
        });
    }
}

#[derive(Debug, Clone)]
struct Noop {
    answer: Bytes,
}

impl hyper::service::Service<HttpRequest<Incoming>> for Noop {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn call(&self, request: HttpRequest<Incoming>) -> Self::Future {
        let answer = if request.uri().path() == APPLY { Bytes::new() } else { self.answer.clone() };
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Raw).max_decoding_message_size(MESSAGE_BYTES_MAX);
            Ok(grpc.unary(Handler { answer }, request).await)
        })
    }
}

struct Handler {
    answer: Bytes,
}

impl Service<Request<Bytes>> for Handler {
    type Response = Response<Bytes>;
    type Error = Status;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Status>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Bytes>) -> Self::Future {
        ready(Ok(Response::new(self.answer.clone())))
    }
}
