//! The index behind gRPC.
//!
//! [`serve`] takes a listener, its configuration, an index and a signal to stop;
//! it reads no environment, binds no port and installs no handler of signals.
//!
//! Connections are accepted here and served by hyper. tonic's own loop would do
//! but for two things: it ends any call at its `grpc-timeout` and so would shed
//! applies, and it leaves connections running when a drain takes too long.
//!
//! Code map: `routes` finds a call's service, `wire` reads and writes messages,
//! `admission` refuses prefix queries that are late or too many, `service` has the
//! calls, `status` maps errors, `observe` shows how it goes, `health` and `reflection` are for probes and tools,
//! `maintenance` cleans up. The server must not know how placements are kept or matched.

mod admission;
mod config;
mod health;
mod maintenance;
mod observe;
mod reflection;
mod routes;
mod service;
mod status;
mod wire;

/// The service's trait and router, generated over the types of `wire`.
#[allow(unreachable_pub, unused_qualifications, clippy::all, reason = "generated code")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/kv_indexer.v1.KVIndexer.rs"));
}

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use admission::Arrivals;
pub use admission::{Admission, Permit, Refusal};
pub use config::{Config, SETTINGS};
use generated::k_v_indexer_server::{KVIndexer, KVIndexerServer};
use maintenance::Maintenance;
use observe::{Observer, Recorder};
use routes::{Other, Routes};
use service::Indexer;

use crate::arena::Index;
use crate::http::Port;
use crate::limits::{MESSAGE_BYTES_MAX, STREAMS_PER_CONNECTION_MAX};

/// What a peer may send on one stream before we answer with more window: a whole
/// message of the largest size. A query has a deadline of 100 ms, so it should
/// not wait for round trips, nor for an adaptive window to learn the link. tonic
/// reads a body as it comes, so a window is no memory by itself.
const STREAM_WINDOW_BYTES: u32 = MESSAGE_BYTES_MAX as u32 + 64 * 1024;

/// The same for a whole connection: two such messages on their way at once.
const CONNECTION_WINDOW_BYTES: u32 = 2 * STREAM_WINDOW_BYTES;

/// Silence after which a connection is pinged.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// Silence after a ping that ends the connection, and with it calls half sent.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Pause after a failed accept: out of file descriptors is not out for good.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that running calls have to finish once the server is asked to stop.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// A server before it runs, for those who want to look into its admission.
#[derive(Debug)]
pub struct Server {
    index: Arc<Index>,
    admission: Arc<Admission>,
    http: Option<TcpListener>,
}

/// Serves `index` on `listener` until `shutdown`, then drains.
///
/// # Errors
/// No thread can be started, or the listener has no local address. A server that
/// runs never fails.
pub async fn serve(
    listener: TcpListener,
    config: Config,
    index: Arc<Index>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    Server::new(config, index).serve(listener, shutdown).await
}

impl Server {
    /// A server of `index`.
    pub fn new(config: Config, index: Arc<Index>) -> Self {
        let admission = Arc::new(Admission::new(config.prefix_queries_in_flight_max));
        Server { index, admission, http: None }
    }

    /// The same with its HTTP port on `listener`: probes, `/metrics` and a page.
    #[must_use]
    pub fn with_http(mut self, listener: TcpListener) -> Self {
        self.http = Some(listener);
        self
    }

    /// Permits and counts of this server.
    pub fn admission(&self) -> Arc<Admission> {
        Arc::clone(&self.admission)
    }

    /// Serves on `listener` until `shutdown`, then drains.
    ///
    /// Draining, no connection and no stream is accepted any more, and running
    /// calls have ten seconds to finish before their connections are cut. Probes
    /// are told `NOT_SERVING`.
    ///
    /// # Errors
    /// No thread can be started, or the listener has no local address. A server that
    /// runs never fails.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()>) -> io::Result<()> {
        tracing::info!(address = %listener.local_addr()?, "listening");
        let _maintenance = Maintenance::start(Arc::clone(&self.index))?;
        let recorder = Arc::new(Recorder::new());
        let (admission, index) = (self.admission, self.index);
        let observer =
            Arc::new(Observer::new(Arc::clone(&index), Arc::clone(&recorder), Arc::clone(&admission)));
        let pages = self.http.map(|listener| Port::open(listener, observer.pages())).transpose()?;
        let calls = Indexer::new(index, Arc::clone(&admission), Arc::clone(&recorder));
        let calls = KVIndexerServer::new(calls).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let health = health::Reporter::serving::<KVIndexerServer<Indexer>>().await;
        let others = [Other::new(health.service()), reflection::v1()?, reflection::v1alpha()?];
        let service = Arrivals::new(Routes::new(calls, others), admission, Arc::clone(&recorder));
        let drain = watch::Sender::new(());
        let mut connections = JoinSet::new();
        accept(&listener, &mut connections, shutdown, |stream| {
            let (open, serving) =
                (recorder.connected(), connection(stream, service.clone(), drain.subscribe()));
            async move {
                serving.await;
                drop(open);
            }
        })
        .await;
        drop(listener);
        observer.draining();
        health.draining().await;
        drain.send_replace(());
        tracing::info!(connections = connections.len(), "draining");
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN_MAX, drained).await.is_err() {
            tracing::warn!(connections = connections.len(), "calls did not finish in time: cut");
            connections.shutdown().await;
        }
        if let Some(pages) = pages {
            pages.close().await;
        }
        Ok(())
    }
}

/// Accepts connections until `shutdown`, each served by a task of its own.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: &TcpListener,
    connections: &mut JoinSet<()>,
    shutdown: impl Future<Output = ()>,
    connection: impl Fn(TcpStream) -> F,
) {
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream));
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            // Forgets connections that ended.
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Serves one connection until its peer leaves, or the drain and its last call end.
async fn connection(
    stream: TcpStream,
    service: Arrivals<Routes<KVIndexerServer<Indexer>, Incoming>>,
    mut drain: watch::Receiver<()>,
) {
    // Answers are written whole, so waiting to fill a packet gains nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "connection without TCP_NODELAY");
    }
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        // A router that gives up on all its queries at once is no attacker.
        .max_pending_accept_reset_streams(STREAMS_PER_CONNECTION_MAX as usize)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = drain.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
