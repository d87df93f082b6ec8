//! A small HTTP port for people, probes and Prometheus.
//!
//! It serves what a [`Pages`] function gives for a path, over HTTP/1.1, and knows
//! nothing of what the pages say. It stands beside the service and must never
//! cost it anything, so all of it is bounded: connections at once, bytes of a
//! request's head, and the time from a connection's first byte to its last. A
//! connection carries one request, so that idle ones cannot keep a probe out.
//! Pages are made on a thread that may wait, one after the other.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use crate::settings::{Setting, SettingError, Settings};

/// Connections at once; a further one is closed as it is accepted.
pub const CONNECTIONS_MAX: usize = 64;

/// Largest head of a request, in bytes.
pub const HEAD_BYTES_MAX: usize = 16 * 1024;

/// Longest that a connection lives, its one request and answer included.
pub const CONNECTION_MAX: Duration = Duration::from_secs(10);

/// Pause after a failed accept: out of file descriptors is not out for good.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What may run on a page: its own inline script and style, and questions to the
/// same port. Nothing else is loaded, whatever text the page shows.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                           connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                           frame-ancestors 'none'";

/// The page that shows `/debug/state`, whole: no other file belongs to it.
pub const STATUS_PAGE: &str = include_str!("status.html");

/// One answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Status of the answer.
    pub status: StatusCode,
    /// Its content type.
    pub kind: &'static str,
    /// The body.
    pub body: Bytes,
}

impl Page {
    /// HTML.
    pub fn html(body: &'static str) -> Self {
        Page {
            status: StatusCode::OK,
            kind: "text/html; charset=utf-8",
            body: Bytes::from_static(body.as_bytes()),
        }
    }

    /// JSON.
    pub fn json(body: String) -> Self {
        Page { status: StatusCode::OK, kind: "application/json", body: body.into() }
    }

    /// Prometheus' text format.
    pub fn metrics(body: String) -> Self {
        Page { status: StatusCode::OK, kind: "text/plain; version=0.0.4; charset=utf-8", body: body.into() }
    }

    /// A line of text, with `200` if all is well and `503` if not.
    pub fn probe(well: bool, line: &str) -> Self {
        let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        Page { status, ..Page::text(line) }
    }

    fn text(line: &str) -> Self {
        let body = format!("{line}\n").into();
        Page { status: StatusCode::OK, kind: "text/plain; charset=utf-8", body }
    }
}

/// Gives the page at a path, `None` where there is none. May take a while.
pub type Pages = Arc<dyn Fn(&str) -> Option<Page> + Send + Sync>;

/// Reads the setting of the port's address: `None` for `off`.
///
/// # Errors
/// The value is neither an address nor `off`.
pub fn address(settings: &Settings, setting: &Setting) -> Result<Option<SocketAddr>, SettingError> {
    let takes = "an IP address and a port, such as [::1]:9464 or 0.0.0.0:9464, or off";
    settings.parse(setting, takes, |text| match text {
        "off" => Some(None),
        _ => text.parse().ok().map(Some),
    })
}

/// An open port, served by a task of its own.
#[derive(Debug)]
pub struct Port {
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Port {
    /// Serves `pages` on `listener`.
    ///
    /// # Errors
    /// The listener has no local address.
    pub fn open(listener: TcpListener, pages: Pages) -> std::io::Result<Self> {
        tracing::info!(address = %listener.local_addr()?, "serving HTTP");
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            // Dropped without a word, the port closes just so.
            let _ = stopped.await;
        };
        Ok(Port { stop, serving: tokio::spawn(serve(listener, pages, shutdown)) })
    }

    /// Accepts nothing more and returns once answers under way are finished.
    pub async fn close(self) {
        drop(self.stop);
        // It ends by itself; a panic in it is told of by its own message.
        let _ = self.serving.await;
    }
}

/// Serves `pages` on `listener` until `shutdown`; then nothing is accepted any more
/// and answers under way are finished.
pub async fn serve(listener: TcpListener, pages: Pages, shutdown: impl Future<Output = ()>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // Pages share what they look at, so making several at once would only make each slower.
    let turn = Arc::new(Semaphore::new(1));
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    if let Ok(place) = Arc::clone(&room).try_acquire_owned() {
                        let serving = connection(stream, Arc::clone(&pages), Arc::clone(&turn));
                        connections.spawn(async move {
                            serving.await;
                            drop(place);
                        });
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "no HTTP connection accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves the one request of a connection, within [`CONNECTION_MAX`].
async fn connection(stream: TcpStream, pages: Pages, turn: Arc<Semaphore>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (pages, turn) = (Arc::clone(&pages), Arc::clone(&turn));
        async move { Ok::<_, Infallible>(answer(&request, pages, turn).await) }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .half_close(true)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_MAX, serving).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "HTTP connection ended"),
        Err(_) => tracing::debug!("HTTP connection took too long: cut"),
    }
}

async fn answer(request: &Request<Incoming>, pages: Pages, turn: Arc<Semaphore>) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response =
            respond(Page { status: StatusCode::METHOD_NOT_ALLOWED, ..Page::text("GET or HEAD") });
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let missing = Page { status: StatusCode::NOT_FOUND, ..Page::text("no such page") };
    let failed = Page { status: StatusCode::INTERNAL_SERVER_ERROR, ..Page::text("the page failed by a bug") };
    // The semaphore is never closed; without a turn the page would be made all the same.
    let turn = turn.acquire_owned().await;
    let made = tokio::task::spawn_blocking(move || {
        let page = pages(&path);
        drop(turn);
        page
    });
    respond(match made.await {
        Ok(page) => page.unwrap_or(missing),
        Err(_) => failed,
    })
}

fn respond(page: Page) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(page.body));
    *response.status_mut() = page.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(page.kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
    response
}
