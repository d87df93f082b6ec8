//! When a server says that it is ready, over HTTP and gRPC.

use std::time::Duration;

use sgl_kv_indexer::pb::admin::DropWorkerRequest;
use sgl_kv_indexer::pb::admin::admin_client::AdminClient;
use sgl_kv_indexer::server::Config;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::server::{Running, apply_synchronised, batch, holders, marked, until};

/// Longer than any test: a server that settles for so long is never ready.
const FOR_EVER: Duration = Duration::from_secs(86_400);

/// Short, and long enough for nothing.
const SHORT: Duration = Duration::from_millis(1);

async fn start(settle: Duration) -> Running {
    Running::start(Config { settle, ..Config::default() }).await
}

/// What gRPC health says of the process and of the index's service.
async fn health(server: &Running) -> [ServingStatus; 2] {
    let mut client = HealthClient::new(server.channel().await);
    let mut found = Vec::new();
    for service in ["", "kv_indexer.v1.KVIndexer"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        found.push(client.check(request).await.expect("an answer").into_inner().status());
    }
    found.try_into().expect("two answers")
}

const READY: [ServingStatus; 2] = [ServingStatus::Serving, ServingStatus::Serving];
const NOT_READY: [ServingStatus; 2] = [ServingStatus::Serving, ServingStatus::NotServing];

#[tokio::test]
async fn a_server_that_settles_answers_but_is_not_ready() {
    let server = start(FOR_EVER).await;
    let mut client = server.client().await;
    client.apply_external_kv_batch(batch("w", 1, &[1])).await.expect("applied");
    assert_eq!(holders(&mut client, &[1]).await, ["w"]);
    let (status, text) = server.get("/readyz").await;
    assert_eq!(status, 503, "{text}");
    assert!(text.contains("bridges have") && text.contains("ms more"), "{text}");
    assert_eq!(server.get("/healthz").await.0, 200);
    assert_eq!(health(&server).await, NOT_READY);
    let state = server.state().await;
    assert_eq!(state["ready"], false);
    assert_eq!(server.series("kv_indexer_ready").await, Some(0.0));
    // A drain does not wait for readiness.
    server.stop().await;
}

#[tokio::test]
async fn without_settling_a_server_is_ready_at_once_whatever_bridges_say() {
    let server = start(Duration::ZERO).await;
    let mut client = server.client().await;
    client.apply_external_kv_batch(marked(batch("w", 1, &[1]), "synchronising")).await.expect("applied");
    assert_eq!(server.get("/readyz").await, (200, "ready\n".to_owned()));
    until(async || health(&server).await, |health| *health == READY).await;
    assert_eq!(server.series("kv_indexer_ready").await, Some(1.0));
}

/// A server whose time to settle is over, but for which `workers` synchronise.
async fn waits_for(workers: &[&str]) -> Running {
    // Readiness is final, so the bridges must have spoken by the time that settling is over. A machine
    // that is too slow for it is given more time.
    for settle_ms in [500, 2_000, 8_000, 32_000] {
        let server = start(Duration::from_millis(settle_ms)).await;
        let mut client = server.client().await;
        for worker in workers {
            let batch = marked(batch(worker, 1, &[1]), "synchronising");
            client.apply_external_kv_batch(batch).await.expect("applied");
        }
        let settled = async || server.get("/readyz").await;
        let (status, _) = until(settled, |(_, text)| !text.contains("ms more")).await;
        if status == 503 {
            return server;
        }
    }
    panic!("the server never waited");
}

#[tokio::test]
async fn it_waits_for_bridges_that_synchronise_and_says_for_whom() {
    let server = waits_for(&["a", "b\nready"]).await;
    let (status, text) = server.get("/readyz").await;
    assert_eq!(status, 503, "{text}");
    assert!(text.contains("2 workers") && text.contains("\"a\"") && text.lines().count() == 1, "{text}");
    assert_eq!(health(&server).await, NOT_READY);
    let mut client = server.client().await;
    apply_synchronised(&mut client, batch("a", 2, &[])).await;
    let (status, text) = server.get("/readyz").await;
    assert!(status == 503 && text.contains("1 workers"), "{text}");
    // A batch that says nothing does not hold it up either.
    client.apply_external_kv_batch(batch("b\nready", 2, &[])).await.expect("applied");
    assert_eq!(server.get("/readyz").await, (200, "ready\n".to_owned()));
    until(async || health(&server).await, |health| *health == READY).await;
    // One that is brought up to date later does not make it unready.
    client.apply_external_kv_batch(marked(batch("c", 1, &[]), "synchronising")).await.expect("applied");
    assert_eq!(server.get("/readyz").await.0, 200);
}

#[tokio::test]
async fn a_worker_that_is_dropped_is_waited_for_no_longer() {
    let server = waits_for(&["a"]).await;
    let request = DropWorkerRequest { worker_id: "a".to_owned() };
    let mut admin = AdminClient::new(server.channel().await);
    assert!(admin.drop_worker(request).await.expect("an answer").into_inner().existed);
    assert_eq!(server.get("/readyz").await, (200, "ready\n".to_owned()));
}

#[tokio::test]
async fn a_watch_goes_on_from_not_ready_to_ready_and_ends_with_the_drain() {
    let server = waits_for(&["a"]).await;
    let mut client = HealthClient::new(server.channel().await);
    let request = HealthCheckRequest { service: "kv_indexer.v1.KVIndexer".to_owned() };
    let mut watch = client.watch(request).await.expect("a watch").into_inner();
    let mut next = async || watch.message().await.expect("a watch").map(|told| told.status());
    assert_eq!(next().await, Some(ServingStatus::NotServing));
    let mut calls = server.client().await;
    apply_synchronised(&mut calls, batch("a", 2, &[])).await;
    assert_eq!(next().await, Some(ServingStatus::Serving));
    drop(calls);
    let stopped = tokio::spawn(server.stop());
    assert_eq!(next().await, Some(ServingStatus::NotServing));
    assert_eq!(next().await, None);
    drop(client);
    stopped.await.expect("a drain");
}

#[tokio::test]
async fn a_watch_of_a_server_that_was_never_ready_ends_with_the_drain() {
    let server = start(FOR_EVER).await;
    let mut client = HealthClient::new(server.channel().await);
    let request = HealthCheckRequest { service: "kv_indexer.v1.KVIndexer".to_owned() };
    let mut watch = client.watch(request).await.expect("a watch").into_inner();
    let first = watch.message().await.expect("a watch").expect("a status");
    assert_eq!(first.status(), ServingStatus::NotServing);
    let stopped = tokio::spawn(server.stop());
    let last = watch.message().await.expect("a watch").expect("a status");
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(watch.message().await.expect("an end").is_none());
    drop(client);
    stopped.await.expect("a drain");
}

#[tokio::test]
async fn bridges_that_do_not_take_part_are_not_waited_for() {
    let server = start(SHORT).await;
    let mut client = server.client().await;
    client.apply_external_kv_batch(batch("w", 1, &[1])).await.expect("applied");
    until(async || server.get("/readyz").await.0, |status| *status == 200).await;
}
