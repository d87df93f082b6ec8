//! Connections to a server, counted.
//!
//! A channel connects by itself whenever it has to and says nothing of it. To a bridge
//! a new connection may mean a new server, so each one that is begun is counted.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// Connects to one server; copies count together.
#[derive(Debug, Clone)]
pub(super) struct Dialler {
    /// Where it listens, if that is no TCP address.
    socket: Option<PathBuf>,
    begun: Arc<AtomicU64>,
}

impl Dialler {
    /// A dialler of the server with this URL.
    pub(super) fn new(server: &str) -> Self {
        let socket = server.strip_prefix("unix:").map(|path| path.strip_prefix("//").unwrap_or(path).into());
        Dialler { socket, begun: Arc::default() }
    }

    /// How many connections were begun.
    pub(super) fn number(&self) -> u64 {
        // A connection is counted before it carries anything, with the release that this pairs with.
        self.begun.load(Ordering::Acquire)
    }

    /// A channel that connects when it is first used and whenever it has to.
    pub(super) fn channel(&self, endpoint: &Endpoint) -> Channel {
        let begun = Arc::clone(&self.begun);
        let count = move || begun.fetch_add(1, Ordering::Release);
        match self.socket.clone() {
            Some(path) => endpoint.connect_with_connector_lazy(service_fn(move |_| {
                count();
                dial_unix(path.clone())
            })),
            None => endpoint.connect_with_connector_lazy(service_fn(move |uri| {
                count();
                dial_tcp(uri)
            })),
        }
    }
}

async fn dial_tcp(uri: Uri) -> io::Result<TokioIo<TcpStream>> {
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    let stream = TcpStream::connect((host, port)).await?;
    // Reports are written whole, so waiting to fill a packet gains nothing.
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(stream))
}

async fn dial_unix(path: PathBuf) -> io::Result<TokioIo<UnixStream>> {
    Ok(TokioIo::new(UnixStream::connect(path).await?))
}
