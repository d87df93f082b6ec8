//! A router of OpenAI-style requests to the worker with the least prefill left to do.
//!
//! `cargo run --example router -- LISTEN INDEX PAGE_SIZE WORKER...`, e.g.
//! `127.0.0.1:8000 http://[::1]:50051 16 http://10.0.0.1:30000 http://10.0.0.2:30000`:
//! SGLang workers under the URLs that their bridges report. A prompt's blocks that a worker
//! does not hold are what it has to prefill; a request goes where these, together with those
//! of the requests it has not answered yet, are fewest. Without an answer of the index that
//! is routing by load. A text is tokenized by a worker's own `/tokenize`; a router in
//! production has the model's tokenizer in itself and saves that round trip.

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use sgl_kv_indexer::client::{Answer, Client, Config, Prompt};
use sgl_kv_indexer::hash::Sglang;

const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;

struct Worker {
    url: String,
    /// Blocks that requests without an answer still have to prefill there.
    prefilling: AtomicUsize,
}

struct Router {
    workers: Vec<Worker>,
    /// Where the search for a worker starts, so that equal ones take turns.
    turn: AtomicUsize,
    index: Client,
    hashing: Sglang,
    http: HttpClient<HttpConnector, Body>,
}

/// Blocks that a worker no longer has to prefill once this is dropped.
struct Prefill<'a>(&'a Worker, usize);

impl Drop for Prefill<'_> {
    fn drop(&mut self) {
        self.0.prefilling.fetch_sub(self.1, Relaxed);
    }
}

impl Router {
    async fn route(self: Arc<Self>, request: Request) -> Response {
        let (mut parts, body) = request.into_parts();
        let Ok(body) = to_bytes(body, BODY_BYTES_MAX).await else {
            return StatusCode::PAYLOAD_TOO_LARGE.into_response();
        };
        let tokens = self.tokens(&body).await;
        let prompt = Prompt::collect(self.hashing.hashes(&tokens));
        let answer = match self.index.match_prefix(&prompt).await {
            Ok(answer) => answer,
            Err(error) if error.class.falls_back() => {
                eprintln!("routing by load: {error}");
                Answer::default()
            }
            Err(error) => return (StatusCode::BAD_GATEWAY, format!("{error}\n")).into_response(),
        };
        let (worker, missing) = self.choose(&prompt, &answer);
        println!("{} of {} blocks to prefill at {}", missing, prompt.blocks(), worker.url);
        worker.prefilling.fetch_add(missing, Relaxed);
        // Over with the answer's head, which an engine sends when it has the first token.
        let _prefill = Prefill(worker, missing);
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let Ok(uri) = format!("{}{path}", worker.url).parse::<Uri>() else {
            return StatusCode::BAD_REQUEST.into_response();
        };
        parts.uri = uri;
        parts.headers.remove(header::HOST);
        match self.http.request(Request::from_parts(parts, Body::from(body))).await {
            Ok(answer) => answer.map(Body::new),
            Err(error) => (StatusCode::BAD_GATEWAY, format!("{}: {error}\n", worker.url)).into_response(),
        }
    }

    /// The worker with the fewest blocks to prefill, and how many of them are this prompt's.
    fn choose(&self, prompt: &Prompt, answer: &Answer) -> (&Worker, usize) {
        let cost = |worker: &Worker| {
            let held = answer.at_address(&worker.url).map_or(0, |found| found.blocks as usize);
            let missing = prompt.blocks().saturating_sub(held);
            (worker.prefilling.load(Relaxed) + missing, missing)
        };
        let (before, after) = self.workers.split_at(self.turn.fetch_add(1, Relaxed) % self.workers.len());
        let workers = after.iter().chain(before);
        let worker = workers.min_by_key(|worker| cost(worker)).expect("main wants a worker");
        (worker, cost(worker).1)
    }

    /// Token ids of a request's prompt; none where there is no telling.
    async fn tokens(&self, body: &Bytes) -> Vec<u32> {
        let request: Value = serde_json::from_slice(body).unwrap_or_default();
        if let Some(tokens) = ids(&request["prompt"]) {
            return tokens;
        }
        let asked = Request::post(format!("{}/tokenize", self.workers[0].url))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.clone()));
        let Ok(asked) = asked else { return Vec::new() };
        let Ok(answer) = self.http.request(asked).await else { return Vec::new() };
        let answer = to_bytes(Body::new(answer), BODY_BYTES_MAX).await.unwrap_or_default();
        let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
        ids(&answer["tokens"]).unwrap_or_default()
    }
}

fn ids(list: &Value) -> Option<Vec<u32>> {
    list.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [listen, index, page_size, workers @ ..] = arguments.as_slice() else {
        return Err("usage: router LISTEN INDEX PAGE_SIZE WORKER...".into());
    };
    if workers.is_empty() {
        return Err("no worker to route to".into());
    }
    let worker = |url: &String| Worker { url: url.clone(), prefilling: AtomicUsize::new(0) };
    let router = Arc::new(Router {
        workers: workers.iter().map(worker).collect(),
        turn: AtomicUsize::new(0),
        index: Client::new(&Config::with_endpoints([index]))?,
        hashing: Sglang::new(page_size.parse::<NonZeroUsize>()?),
        http: HttpClient::builder(TokioExecutor::new()).build_http(),
    });
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on {}", listener.local_addr()?);
    let route = |State(router): State<Arc<Router>>, request: Request| router.route(request);
    Ok(axum::serve(listener, axum::Router::new().fallback(route).with_state(router)).await?)
}
