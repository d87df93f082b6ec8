//! The index behind gRPC.
//!
//! [`serve`] takes a listener, its configuration, an index and a signal to stop;
//! it reads no environment, binds no port and installs no handler of signals.
//!
//! Connections are accepted here and served by hyper. tonic's own loop would do
//! but for two things: it ends any call at its `grpc-timeout` and so would shed
//! applies, and it leaves connections running when a drain takes too long.
//!
//! Code map: `connection` speaks TLS and HTTP/2, `watch` says when to cut it,
//! `arrivals` takes each call and asks `security` and `memory` for it, `received`
//! gathers its message, `routes` finds its service, `admission` refuses it if late or
//! too many, `wire` reads and writes messages, `service` has the calls, `status` maps errors. `observe` shows how it
//! goes, `trace` follows a caller, `health` and `reflection` are for probes and tools,
//! `readiness` knows what the server still waits for, `admin` is for operators, with
//! `drops` telling batches that a drop has overtaken, `liveness` deals with workers
//! that fall silent, `maintenance` cleans up, `instance` says in each answer which
//! server gave it. The server must not know how placements are kept or matched.

mod admin;
mod admission;
mod arrivals;
mod config;
mod connection;
mod drops;
mod health;
mod instance;
mod liveness;
mod maintenance;
mod memory;
mod observe;
mod readiness;
mod received;
mod reflection;
mod routes;
mod security;
mod service;
mod status;
mod trace;
mod watch;
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

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use admin::Operator;
pub use admission::{Admission, Permit, Refusal};
use arrivals::{Arrivals, Doors};
pub use config::{Config, SETTINGS};
use drops::Drops;
use generated::k_v_indexer_server::{KVIndexer, KVIndexerServer};
use instance::Instance;
use liveness::Watch;
use maintenance::Maintenance;
use memory::Budget;
use observe::{Observer, Recorder, Refused};
use readiness::Readiness;
use routes::{Other, Routes};
pub use security::Security;
use service::Indexer;

use crate::arena::Index;
use crate::http::Port;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::pb::admin::admin_server::AdminServer;

/// Pause after a failed accept: out of file descriptors is not out for good.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that running calls have to finish once the server is asked to stop.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// A server before it runs, for those who want to look into its admission.
#[derive(Debug)]
pub struct Server {
    index: Arc<Index>,
    admission: Arc<Admission>,
    instance: Instance,
    config: Config,
    security: Security,
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
        Server {
            index,
            admission,
            instance: Instance::random(),
            config,
            security: Security::default(),
            http: None,
        }
    }

    /// The same with TLS and access as given; without, everybody may do everything.
    #[must_use]
    pub fn with_security(mut self, security: Security) -> Self {
        self.security = security;
        self
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

    /// The random id of this server, 32 hex digits, which the metadata of every answer has as
    /// `kv-indexer-instance`: another id means another server, with an index of its own.
    pub fn instance(&self) -> &str {
        self.instance.as_str()
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
        tracing::info!(instance = self.instance(), "serving an index of its own");
        tracing::info!(address = %listener.local_addr()?, "listening");
        let _maintenance = Maintenance::start(Arc::clone(&self.index))?;
        let recorder = Arc::new(Recorder::new());
        let watch = |ttl| Watch::start(Arc::clone(&self.index), Arc::clone(&recorder), ttl);
        let _watch = self.config.worker_ttl.map(watch).transpose()?;
        let (admission, index) = (self.admission, self.index);
        let budget = Arc::new(Budget::new(self.config.message_memory_bytes, Arc::clone(&recorder)));
        let readiness = Arc::new(Readiness::new(self.config.settle, Arc::clone(&recorder)));
        let observer = Arc::new(Observer::new(
            Arc::clone(&index),
            Arc::clone(&recorder),
            Arc::clone(&admission),
            Arc::clone(&budget),
            Arc::clone(&readiness),
            self.instance.clone(),
        ));
        let pages = self.http.map(|listener| Port::open(listener, observer.pages())).transpose()?;
        let drops = Arc::new(Drops::default());
        let operator = Operator::new(Arc::clone(&index), Arc::clone(&drops), Arc::clone(&recorder));
        let operator = AdminServer::new(operator).max_decoding_message_size(memory::OTHER_BYTES_MAX);
        let calls =
            Indexer::new(index, Arc::clone(&admission), Arc::clone(&recorder), drops, self.instance.clone());
        let calls = KVIndexerServer::new(calls).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let health = health::Reporter::starting::<KVIndexerServer<Indexer>>(readiness.is_ready()).await;
        let mut getting_ready = JoinSet::new();
        if !readiness.is_ready() {
            getting_ready.spawn(health.clone().follow(Arc::clone(&readiness)));
        }
        let others =
            [Other::new(operator), Other::new(health.service()), reflection::v1()?, reflection::v1alpha()?];
        let routes = Routes::new(calls, others);
        let (gate, traces) = (self.security.gate(), self.config.trace_context);
        let instance = self.instance;
        let doors = Doors { admission, recorder: Arc::clone(&recorder), budget, gate, traces, instance };
        let service = Arrivals::new(routes, Arc::new(doors));
        let acceptor = self.security.acceptor();
        let is_exposed = !listener.local_addr()?.ip().is_loopback();
        if is_exposed && self.security.is_open() {
            tracing::warn!(
                "anybody who reaches this address may query and change the index: set KV_INDEXER_TLS_CLIENT_CA_FILE \
                 or KV_INDEXER_APPLY_TOKEN_FILE, or see to it that only bridges and routers do"
            );
        }
        let looking = tokio::spawn(self.security.keep_looking());
        let places = Arc::new(Semaphore::new(self.config.connections_max));
        let drain = tokio::sync::watch::Sender::new(());
        let mut connections = JoinSet::new();
        accept(&listener, &mut connections, shutdown, |stream| {
            let serving = match Arc::clone(&places).try_acquire_owned() {
                Ok(place) => {
                    let held = (place, recorder.connected());
                    let drain = drain.subscribe();
                    Some((connection::serve(stream, acceptor.clone(), service.clone(), drain), held))
                }
                Err(_) => {
                    recorder.refused(Refused::Connections, &"all places for connections are taken");
                    None
                }
            };
            async move {
                if let Some((serving, held)) = serving {
                    serving.await;
                    drop(held);
                }
            }
        })
        .await;
        drop(listener);
        looking.abort();
        readiness.drain();
        getting_ready.shutdown().await;
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
