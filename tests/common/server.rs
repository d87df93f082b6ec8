//! A server that records applies and answers as it is told.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use sgl_kv_indexer::pb::{ApplyExternalKvBatchRequest, ApplyExternalKvBatchResponse};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::{PAUSE, TRIES};

/// A running server.
pub struct Recorder {
    pub address: SocketAddr,
    applies: mpsc::UnboundedReceiver<(ApplyExternalKvBatchRequest, Code)>,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    answers: watch::Sender<bool>,
}

impl Recorder {
    /// Serves on a free port; the first applies get `answers`, the others `Ok`.
    pub async fn start(answers: &[Code]) -> Self {
        Recorder::start_at(free_address(), answers).await
    }

    /// Serves at this address as soon as its last owner has let go of it.
    pub async fn start_at(address: SocketAddr, answers: &[Code]) -> Self {
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        let (applied, applies) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let (may_answer, answering) = watch::channel(true);
        let service =
            Service { answers: Arc::new(Mutex::new(answers.iter().copied().collect())), applied, answering };
        let serving = tokio::spawn(async move {
            let stopped = async move {
                let _ = stopped.await;
            };
            let server = Server::builder().add_service(service);
            server.serve_with_incoming_shutdown(TcpIncoming::from(listener), stopped).await.expect("served");
        });
        Recorder { address, applies, stop, serving, answers: may_answer }
    }

    /// The bridge's setting for it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next apply and what it was answered; a test whose apply never comes fails in the end.
    pub async fn next(&mut self) -> (ApplyExternalKvBatchRequest, Code) {
        let next = tokio::time::timeout(TRIES * PAUSE, self.applies.recv()).await;
        next.expect("an apply").expect("serving")
    }

    /// Records applies and leaves them without an answer, until told otherwise.
    pub fn hold(&self, held: bool) {
        self.answers.send_replace(!held);
    }

    /// Stops; returns the address for the next one.
    pub async fn stop(self) -> SocketAddr {
        let _ = self.stop.send(());
        self.serving.await.expect("served");
        self.address
    }
}

/// An address whose port nobody has right now.
pub fn free_address() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address")
}

#[derive(Clone)]
struct Service {
    answers: Arc<Mutex<VecDeque<Code>>>,
    applied: mpsc::UnboundedSender<(ApplyExternalKvBatchRequest, Code)>,
    answering: watch::Receiver<bool>,
}

impl NamedService for Service {
    const NAME: &'static str = "kv_indexer.v1.KVIndexer";
}

type Answer<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        assert_eq!(request.uri().path(), "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch");
        let apply = Apply(self.clone());
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(apply, request).await) })
    }
}

struct Apply(Service);

impl UnaryService<ApplyExternalKvBatchRequest> for Apply {
    type Response = ApplyExternalKvBatchResponse;
    type Future = Answer<Response<Self::Response>, Status>;

    fn call(&mut self, request: Request<ApplyExternalKvBatchRequest>) -> Self::Future {
        let code = self.0.answers.lock().expect("answers").pop_front().unwrap_or(Code::Ok);
        let _ = self.0.applied.send((request.into_inner(), code));
        let mut answering = self.0.answering.clone();
        Box::pin(async move {
            // Its end, a server that stops, lets everybody go.
            let _ = answering.wait_for(|answering| *answering).await;
            if code == Code::Ok {
                Ok(Response::new(ApplyExternalKvBatchResponse {}))
            } else {
                Err(Status::new(code, "as told"))
            }
        })
    }
}
