//! A server of this test process, with both of its ports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{
    ApplyExternalKvBatchRequest, ExternalKvAction, GetExternalKvHitCountsRequest,
    MatchExternalKvPrefixRequest,
};
use sgl_kv_indexer::server::{Config, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;

/// Longest that a test waits for what must come; a machine may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server.
pub(crate) struct Running {
    pub(crate) instance: String,
    pub(crate) rpc: SocketAddr,
    http: SocketAddr,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<std::io::Result<()>>,
}

impl Running {
    pub(crate) async fn start(config: Config) -> Self {
        Running::start_with(config, Arc::new(Index::new())).await
    }

    pub(crate) async fn start_with(config: Config, index: Arc<Index>) -> Self {
        let [listener, port] = [
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
        ];
        let (rpc, http) = (listener.local_addr().expect("bound"), port.local_addr().expect("bound"));
        let server = Server::new(config, index).with_http(port);
        let instance = server.instance().to_owned();
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Running { instance, rpc, http, stop, ended }
    }

    pub(crate) async fn channel(&self) -> Channel {
        let endpoint = Channel::from_shared(format!("http://{}", self.rpc)).expect("a URL");
        endpoint.connect().await.expect("a server")
    }

    pub(crate) async fn client(&self) -> KvIndexerClient<Channel> {
        KvIndexerClient::new(self.channel().await)
    }

    /// Status and body of a `GET` at the HTTP port.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.http).await.expect("a server");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{head:?}")), body.to_owned())
    }

    pub(crate) async fn state(&self) -> serde_json::Value {
        let (status, text) = self.get("/debug/state").await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// The value of a series, if there is one.
    pub(crate) async fn series(&self, name: &str) -> Option<f64> {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200, "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|value| value.parse().unwrap_or_else(|_| panic!("{value:?}")))
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).expect("a running server");
        self.ended.await.expect("no panic").expect("a drain");
    }
}

/// A report of these blocks at HBM; none of them is an empty batch.
pub(crate) fn batch(worker: &str, seq: u64, hashes: &[i64]) -> ApplyExternalKvBatchRequest {
    let action = ExternalKvAction { r#type: 1, tier: 1, hashes: hashes.to_vec(), ..Default::default() };
    ApplyExternalKvBatchRequest {
        worker_id: worker.to_owned(),
        seq,
        actions: if hashes.is_empty() { Vec::new() } else { vec![action] },
        worker_address: format!("http://{worker}:1"),
        cache_spec: None,
    }
}

/// The same with what its bridge says of its stream.
pub(crate) fn marked(
    batch: ApplyExternalKvBatchRequest,
    stream: &'static str,
) -> Request<ApplyExternalKvBatchRequest> {
    let mut request = Request::new(batch);
    request.metadata_mut().insert("kv-indexer-stream", MetadataValue::from_static(stream));
    request
}

/// Applies a batch of a bridge that knows which instance it has brought up to date.
pub(crate) async fn apply_synchronised(
    client: &mut KvIndexerClient<Channel>,
    batch: ApplyExternalKvBatchRequest,
) {
    let question = GetExternalKvHitCountsRequest { hashes: vec![1] };
    let answer = client.get_external_kv_hit_counts(question).await.expect("an answer");
    let instance = answer.metadata().get("kv-indexer-instance").expect("an instance").clone();
    let mut request = marked(batch, "synchronised");
    request.metadata_mut().insert("kv-indexer-instance", instance);
    client.apply_external_kv_batch(request).await.expect("applied");
}

/// The workers that hold the first of these blocks, by name.
pub(crate) async fn holders(client: &mut KvIndexerClient<Channel>, hashes: &[i64]) -> Vec<String> {
    let request = MatchExternalKvPrefixRequest { hashes: hashes.to_vec(), max_blocks: 0 };
    let answer = client.match_external_kv_prefix(request).await.expect("an answer").into_inner();
    let mut workers: Vec<_> = answer.matches.into_iter().map(|found| found.worker_id).collect();
    workers.sort();
    workers
}

/// Asks until the answer is right.
pub(crate) async fn until<T: std::fmt::Debug>(
    mut ask: impl AsyncFnMut() -> T,
    is_right: impl Fn(&T) -> bool,
) -> T {
    let began = Instant::now();
    loop {
        let answer = ask().await;
        if is_right(&answer) {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "still {answer:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
