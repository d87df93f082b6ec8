//! The server's HTTP port: probes, metrics, state, page, and its bounds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::http::{CONNECTIONS_MAX, HEAD_BYTES_MAX};
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{
    ApplyExternalKvBatchRequest, ExternalKvAction, MatchExternalKvPrefixRequest, WorkerCacheSpec,
};
use sgl_kv_indexer::server::{Admission, Config, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

/// A server with an HTTP port.
struct Running {
    rpc: SocketAddr,
    http: SocketAddr,
    index: Arc<Index>,
    admission: Arc<Admission>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<std::io::Result<()>>,
}

impl Running {
    async fn start() -> Self {
        let [listener, port] = [
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
        ];
        let (rpc, http) = (listener.local_addr().expect("bound"), port.local_addr().expect("bound"));
        let config = Config { prefix_queries_in_flight_max: 1, settle: Duration::ZERO, ..Config::default() };
        let index = Arc::new(Index::new());
        let server = Server::new(config, Arc::clone(&index)).with_http(port);
        let admission = server.admission();
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Running { rpc, http, index, admission, stop, ended }
    }

    async fn client(&self) -> KvIndexerClient<Channel> {
        KvIndexerClient::connect(format!("http://{}", self.rpc)).await.expect("a server")
    }

    async fn get(&self, path: &str) -> (u16, String) {
        get(self.http, path).await
    }

    /// The values of one scrape, by series.
    async fn scrape(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200, "{text}");
        let series = text.lines().filter(|line| !line.starts_with('#'));
        let series = series.map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line:?}")))
        });
        series.collect()
    }

    /// Scrapes until the values are as they should be; a snapshot of the index may be a second old.
    async fn scrape_until(&self, is_right: impl Fn(&BTreeMap<String, f64>) -> bool) -> BTreeMap<String, f64> {
        let mut last = BTreeMap::new();
        for _ in 0..1_000 {
            last = self.scrape().await;
            if is_right(&last) {
                return last;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("never as expected: {last:#?}");
    }
}

/// Status and body of a `GET`.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let answer = exchange(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (status(head), body.to_owned())
}

fn status(head: &str) -> u16 {
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.unwrap_or_else(|| panic!("{head:?}"))
}

/// Sends bytes and reads until the peer ends.
async fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("a server");
    // A peer that has refused may have closed before it read everything.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).expect("UTF-8")
}

fn batch(worker: &str, seq: u64, hashes: &[i64]) -> ApplyExternalKvBatchRequest {
    let action = ExternalKvAction { r#type: 1, tier: 1, hashes: hashes.to_vec(), ..Default::default() };
    ApplyExternalKvBatchRequest {
        worker_id: worker.to_owned(),
        seq,
        actions: vec![action],
        worker_address: format!("http://{worker}:1"),
        cache_spec: None,
    }
}

async fn ask(client: &mut KvIndexerClient<Channel>, hashes: &[i64]) -> Result<u32, tonic::Status> {
    let request = MatchExternalKvPrefixRequest { hashes: hashes.to_vec(), max_blocks: 0 };
    Ok(client.match_external_kv_prefix(request).await?.into_inner().best_prefix_blocks)
}

#[tokio::test]
async fn counters_start_at_zero_and_every_family_has_its_help_and_type() {
    let server = Running::start().await;
    let (_, text) = server.get("/metrics").await;
    let words = |prefix: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
        lines.map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect()
    };
    let (helped, typed) = (words("# HELP "), words("# TYPE "));
    assert_eq!(helped, typed);
    assert!(typed.len() > 25, "{typed:?}");
    for (series, value) in server.scrape().await {
        let name = series.split('{').next().unwrap_or_default();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let family = family.filter(|family| typed.contains(*family)).unwrap_or(name);
        assert!(typed.contains(family), "{series} has no type");
        assert!(family.starts_with("kv_indexer_"), "{series}");
        if family.ends_with("_total") {
            assert_eq!(value, 0.0, "{series}");
        }
    }
}

#[tokio::test]
async fn queries_and_reports_are_counted_by_what_became_of_them() {
    let server = Running::start().await;
    let mut client = server.client().await;
    client.apply_external_kv_batch(batch("w0", 1, &[1, 2, 3])).await.expect("applied");
    let invalid = client.apply_external_kv_batch(batch("", 1, &[1])).await.unwrap_err();
    assert_eq!(invalid.code(), tonic::Code::InvalidArgument);
    for (hashes, best) in [(&[1, 2, 3][..], 3), (&[1, 2, 9], 2), (&[9, 1, 2], 0), (&[8], 0)] {
        assert_eq!(ask(&mut client, hashes).await.expect("an answer"), best);
    }
    let permit = server.admission.admit().expect("the only permit");
    ask(&mut client, &[1]).await.unwrap_err();
    let during = server.scrape().await;
    drop(permit);
    let after = server.scrape().await;
    let expected = [
        (r#"kv_indexer_prefix_queries_total{matched="whole"}"#, 1.0),
        (r#"kv_indexer_prefix_queries_total{matched="part"}"#, 1.0),
        (r#"kv_indexer_prefix_queries_total{matched="first_block_unknown"}"#, 2.0),
        (r#"kv_indexer_prefix_queries_total{matched="nothing"}"#, 0.0),
        (r#"kv_indexer_rejections_total{reason="overloaded"}"#, 1.0),
        (r#"kv_indexer_rpcs_total{method="MatchExternalKvPrefix",code="OK"}"#, 4.0),
        (r#"kv_indexer_rpcs_total{method="MatchExternalKvPrefix",code="RESOURCE_EXHAUSTED"}"#, 1.0),
        (r#"kv_indexer_rpcs_total{method="ApplyExternalKvBatch",code="INVALID_ARGUMENT"}"#, 1.0),
        (r#"kv_indexer_rpc_duration_seconds_count{method="MatchExternalKvPrefix"}"#, 5.0),
        (r#"kv_indexer_rpcs_in_flight{method="MatchExternalKvPrefix"}"#, 0.0),
        ("kv_indexer_prefix_asked_blocks_sum", 10.0),
        ("kv_indexer_prefix_matched_blocks_sum", 5.0),
        (r#"kv_indexer_prefix_matched_blocks_bucket{le="0"}"#, 2.0),
        ("kv_indexer_scan_duration_seconds_count", 4.0),
        ("kv_indexer_lock_wait_seconds_count", 4.0),
        ("kv_indexer_apply_batch_hashes_sum", 3.0),
        ("kv_indexer_connections", 1.0),
        ("kv_indexer_prefix_permits_out", 0.0),
    ];
    for (series, value) in expected {
        assert_eq!(after.get(series), Some(&value), "{series} of {after:#?}");
    }
    assert_eq!(during["kv_indexer_prefix_permits_out"], 1.0);
}

#[tokio::test]
async fn the_index_and_its_workers_are_shown_under_any_name() {
    let server = Running::start().await;
    let mut client = server.client().await;
    let hostile = "w\"1\\\n<b>{}=,";
    client.apply_external_kv_batch(batch("w0", 1, &[1, 2, 3])).await.expect("applied");
    let spec = WorkerCacheSpec { version: 1, components: 3, swa_window_tokens: 64, ..Default::default() };
    let with_spec = ApplyExternalKvBatchRequest { cache_spec: Some(spec), ..batch(hostile, 5, &[3, 4]) };
    client.apply_external_kv_batch(with_spec).await.expect("applied");
    client.apply_external_kv_batch(batch("w0", 4, &[1])).await.expect("applied");
    let scraped = server.scrape_until(|scraped| scraped["kv_indexer_workers"] == 2.0).await;
    let expected = [
        ("kv_indexer_blocks", 4.0),
        (r#"kv_indexer_placements{tier="HBM"}"#, 5.0),
        (r#"kv_indexer_worker_blocks{worker="w0",tier="HBM"}"#, 3.0),
        (r#"kv_indexer_worker_blocks{worker="w0",tier="SSD"}"#, 0.0),
        (r#"kv_indexer_worker_blocks{worker="w\"1\\\n<b>{}=,",tier="HBM"}"#, 2.0),
        (r#"kv_indexer_worker_info{worker="w0",address="http://w0:1"}"#, 1.0),
        (r#"kv_indexer_worker_reports_total{worker="w0"}"#, 2.0),
        (r#"kv_indexer_worker_report_gaps_total{worker="w0"}"#, 1.0),
    ];
    for (series, value) in expected {
        assert_eq!(scraped.get(series), Some(&value), "{series} of {scraped:#?}");
    }
    assert!(scraped[r#"kv_indexer_worker_last_report_timestamp_seconds{worker="w0"}"#] > 1.7e9);
    assert!(scraped[r#"kv_indexer_memory_bytes{table="blocks"}"#] > 0.0);

    let (status, text) = server.get("/debug/state").await;
    let state: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &state["kind"], &state["ready"]), (200, &"server".into(), &true.into()));
    assert_eq!(state["index"]["blocks"], 4);
    let worker = state["workers"].as_array().expect("workers").iter().find(|worker| worker["id"] == hostile);
    let worker = worker.unwrap_or_else(|| panic!("{state:#}"));
    assert_eq!(worker["blocks"]["HBM"], 2);
    assert_eq!(worker["spec"]["components"], serde_json::json!(["full", "swa"]));
}

#[tokio::test]
async fn the_series_of_a_gone_worker_go_with_it() {
    let server = Running::start().await;
    let mut client = server.client().await;
    for worker in ["stays", "goes"] {
        client.apply_external_kv_batch(batch(worker, 1, &[1, 2])).await.expect("applied");
    }
    let of = |scraped: &BTreeMap<String, f64>, worker: &str| {
        scraped.keys().filter(|series| series.contains(&format!("worker=\"{worker}\""))).count()
    };
    let before = server.scrape_until(|scraped| scraped["kv_indexer_workers"] == 2.0).await;
    assert!(of(&before, "goes") > 5 && of(&before, "goes") == of(&before, "stays"), "{before:#?}");
    assert!(server.index.remove_worker("goes"));
    let after = server.scrape_until(|scraped| scraped["kv_indexer_workers"] == 1.0).await;
    assert_eq!((of(&after, "goes"), of(&after, "stays")), (0, of(&before, "stays")), "{after:#?}");
    // Back again, its counters begin anew.
    client.apply_external_kv_batch(batch("goes", 9, &[1])).await.expect("applied");
    let again = server.scrape_until(|scraped| scraped["kv_indexer_workers"] == 2.0).await;
    assert_eq!(again[r#"kv_indexer_worker_reports_total{worker="goes"}"#], 1.0);
    assert_eq!(again[r#"kv_indexer_worker_report_gaps_total{worker="goes"}"#], 0.0);
}

#[tokio::test]
async fn probes_follow_the_drain() {
    let server = Running::start().await;
    assert_eq!(server.get("/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(server.get("/readyz").await, (200, "ready\n".to_owned()));
    // A call that is half sent holds the drain up until it is cut.
    let mut half = TcpStream::connect(server.rpc).await.expect("a server");
    let (mut sender, connection) = {
        let stream = TcpStream::connect(server.rpc).await.expect("a server");
        h2::client::handshake(stream).await.expect("HTTP/2")
    };
    let connection = tokio::spawn(connection);
    let request = http::Request::post("http://x/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
    let request = request.header("content-type", "application/grpc").body(()).expect("a request");
    let (_answer, body) = sender.send_request(request, false).expect("an open connection");
    server
        .scrape_until(|scraped| {
            scraped[r#"kv_indexer_rpcs_in_flight{method="MatchExternalKvPrefix"}"#] == 1.0
        })
        .await;
    server.stop.send(()).expect("a running server");
    for tries in 0.. {
        let (status, text) = get(server.http, "/readyz").await;
        if status == 503 {
            assert_eq!(text, "draining\n");
            break;
        }
        assert!(tries < 1_000, "ready while draining");
        tokio::task::yield_now().await;
    }
    assert_eq!(get(server.http, "/healthz").await.0, 200);
    drop((body, sender));
    connection.abort();
    half.shutdown().await.expect("an open socket");
    drop(half);
    server.ended.await.expect("no panic").expect("a drain");
    assert!(TcpStream::connect(server.http).await.is_err(), "the port is closed at the end");
}

#[tokio::test]
async fn the_page_loads_nothing_and_sets_names_as_text_only() {
    let server = Running::start().await;
    let answer = exchange(server.http, "GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let (head, page) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
    assert!(head.contains("text/html"), "{head}");
    for loads in
        ["src=", "@import", "url(", "href=\"http", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("]
    {
        assert!(!page.contains(loads), "the page has {loads}");
    }
    assert!(page.contains("viewport") && page.contains("debug/state"));
    assert!(page.len() < 32 * 1024, "{} bytes", page.len());
}

#[tokio::test]
async fn what_is_no_page_is_refused() {
    let server = Running::start().await;
    assert_eq!(server.get("/nowhere").await.0, 404);
    assert_eq!(server.get("/metrics/../x").await.0, 404);
    let posted =
        exchange(server.http, "POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(status(&posted), 405, "{posted}");
    let head = exchange(server.http, "HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(status(&head) == 200 && head.ends_with("\r\n\r\n"), "{head}");
    let long = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(2 * HEAD_BYTES_MAX));
    let refused = exchange(server.http, &long).await;
    assert!(refused.is_empty() || status(&refused) == 431, "{refused}");
    assert_eq!(server.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn connections_beyond_the_bound_are_closed_and_silent_ones_cut() {
    let server = Running::start().await;
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        silent.push(TcpStream::connect(server.http).await.expect("a server"));
    }
    // Accepted in order, so by the time this one is answered all others have their place.
    let answer = exchange(server.http, "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(answer, "", "a place beyond the bound");
    // From here the clock moves on only when there is nothing else to do.
    tokio::time::pause();
    for mut stream in silent {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    }
    tokio::time::resume();
    assert_eq!(server.get("/healthz").await.0, 200);
}
