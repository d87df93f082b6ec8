//! The bridge's HTTP pages: what a stream goes through, seen from outside.

mod common;

use common::bridge::{Bridge, numbered};
use common::publisher::Publisher;
use common::server::Recorder;
use serde_json::Value;
use sgl_kv_indexer::bridge::observe;
use sgl_kv_indexer::http::Pages;
use tonic::Code;

/// Status and text of a page.
fn page(pages: &Pages, path: &str) -> (u16, String) {
    let page = pages(path).unwrap_or_else(|| panic!("{path} is no page"));
    (page.status.as_u16(), String::from_utf8(page.body.to_vec()).expect("UTF-8"))
}

/// The value of a series.
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{series} is not in {text}"))
}

#[tokio::test]
async fn a_stream_is_shown_from_its_start_through_a_gap() {
    let mut publisher = Publisher::bind("").await;
    let server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    let pages = observe::pages(bridge.statuses.clone());
    let (status, text) = page(&pages, "/metrics");
    assert_eq!(status, 200);
    assert_eq!(value(&text, r#"kv_indexer_bridge_stream_last_sequence{worker="w0"}"#), -1.0);
    assert_eq!(value(&text, r#"kv_indexer_bridge_stream_batches_total{worker="w0"}"#), 0.0);
    assert_eq!(value(&text, r#"kv_indexer_bridge_stream_faults_total{worker="w0",fault="gaps"}"#), 0.0);
    assert!(!text.contains("incomplete_since_timestamp_seconds{"), "{text}");
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    publisher.send_frames(numbered(3)).await;
    bridge.until(|now| now.last_sequence == Some(3)).await;
    bridge.until(|now| now.servers[0].pending_bytes == 0 && now.servers[0].failures == 0).await;

    let (_, text) = page(&pages, "/metrics");
    let expected = [
        (r#"kv_indexer_bridge_stream_connected{worker="w0"}"#, 1.0),
        (r#"kv_indexer_bridge_stream_complete{worker="w0"}"#, 0.0),
        (r#"kv_indexer_bridge_stream_followed{worker="w0"}"#, 1.0),
        (r#"kv_indexer_bridge_stream_batches_total{worker="w0"}"#, 2.0),
        (r#"kv_indexer_bridge_stream_faults_total{worker="w0",fault="gaps"}"#, 1.0),
        (r#"kv_indexer_bridge_stream_faults_total{worker="w0",fault="missing_batches"}"#, 2.0),
    ];
    for (series, expected) in expected {
        assert_eq!(value(&text, series), expected, "{series}");
    }
    let since = r#"kv_indexer_bridge_stream_incomplete_since_timestamp_seconds{worker="w0",why="gap"}"#;
    assert!(value(&text, since) > 1.7e9);

    let (status, text) = page(&pages, "/debug/state");
    let state: Value = serde_json::from_str(&text).expect("JSON");
    let stream = &state["streams"][0];
    assert_eq!((status, &state["kind"], &state["ready"]), (200, &"bridge".into(), &true.into()));
    assert_eq!((&stream["worker"], &stream["last_sequence"]), (&"w0".into(), &3.into()));
    assert_eq!((&stream["incomplete"]["why"], &stream["faults"]["gaps"]), (&"gap".into(), &1.into()));
    assert_eq!(page(&pages, "/readyz").0, 200);
    assert!(page(&pages, "/").1.contains("debug/state"));
    assert!(pages("/nowhere").is_none());
    bridge.stop().await;
}

#[tokio::test]
async fn a_stream_that_has_ended_is_not_ready() {
    let publisher = Publisher::bind("").await;
    // The clear that a bridge begins with is refused for good.
    let server = Recorder::start(&[Code::InvalidArgument]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    let pages = observe::pages(bridge.statuses.clone());
    bridge.until(|now| now.ended.is_some()).await;
    assert_eq!(page(&pages, "/readyz").0, 503);
    assert_eq!(page(&pages, "/healthz").0, 200);
    let (_, text) = page(&pages, "/metrics");
    assert_eq!(value(&text, r#"kv_indexer_bridge_stream_followed{worker="w0"}"#), 0.0);
    bridge.running.await.expect("no panic").expect_err("a refusal");
}
