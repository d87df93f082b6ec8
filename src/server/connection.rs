//! One connection: TLS if there is, then HTTP/2, until its peer leaves or the drain.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;

use super::arrivals::Arrivals;
use super::generated::k_v_indexer_server::KVIndexerServer;
use super::instance::Stamped;
use super::observe::Refused;
use super::received::Received;
use super::routes::Routes;
use super::security::{Acceptor, Grants};
use super::service::Indexer;
use super::watch::{Counted, Judge, TICK, Verdict, Watch};
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

/// Longest that a TLS handshake may take.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Largest list of headers of a call, in bytes; a call has a few hundred.
const HEADER_BYTES_MAX: u32 = 16 * 1024;

/// What answers the calls of a connection.
pub(super) type Service = Arrivals<Routes<KVIndexerServer<Indexer>, Received>>;

/// Serves one connection until its peer leaves, or the drain and its last call end.
pub(super) async fn serve(
    stream: TcpStream,
    acceptor: Option<Arc<Acceptor>>,
    service: Service,
    mut drain: watch::Receiver<()>,
) {
    // Answers are written whole, so waiting to fill a packet gains nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "connection without TCP_NODELAY");
    }
    let Some(acceptor) = acceptor else {
        return calls(stream, service, Grants::default(), drain).await;
    };
    let recorder = Arc::clone(&service.doors().recorder);
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)) => shaken,
        _ = drain.changed() => return,
    };
    match shaken {
        Ok(Ok(stream)) => {
            let grants = service.doors().gate.grants(&stream);
            calls(stream, service, grants, drain).await;
        }
        Ok(Err(error)) => recorder.refused(Refused::Handshake, &error),
        Err(_) => recorder.refused(Refused::Handshake, &"the TLS handshake took too long"),
    }
}

/// Serves the calls of a connection over what carries its bytes.
async fn calls(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: Service,
    grants: Grants,
    mut drain: watch::Receiver<()>,
) {
    let watch = Arc::new(Watch::default());
    let recorder = Arc::clone(&service.doors().recorder);
    let stream = Counted::new(stream, Arc::clone(&watch));
    // Outside of everything else, so that no answer leaves without it.
    let instance = service.doors().instance.clone();
    let service = Stamped::new(service.of(Arc::clone(&watch), grants), instance);
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .max_header_list_size(HEADER_BYTES_MAX)
        // A router that gives up on all its queries at once is no attacker.
        .max_pending_accept_reset_streams(STREAMS_PER_CONNECTION_MAX as usize)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let mut judge = Judge::default();
    let mut looks = tokio::time::interval_at(Instant::now() + TICK, TICK);
    let (mut is_leaving, mut is_draining) = (false, false);
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            _ = drain.changed(), if !is_draining => {
                is_draining = true;
                connection.as_mut().graceful_shutdown();
            }
            _ = looks.tick() => match judge.look(&watch) {
                Verdict::Keep => {}
                Verdict::Quiet if is_leaving => {}
                Verdict::Quiet => {
                    is_leaving = true;
                    connection.as_mut().graceful_shutdown();
                }
                Verdict::NotOpened => return recorder.refused(Refused::Unresponsive, &"no HTTP/2 in time"),
                Verdict::Stalled => return recorder.refused(Refused::Unresponsive, &"answers are not taken"),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
