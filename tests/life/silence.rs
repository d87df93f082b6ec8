//! Workers that fall silent, over gRPC. Times are short and waits are generous: what must come is
//! waited for, and what must not come is looked for where something later has come.

use std::time::Duration;

use sgl_kv_indexer::server::Config;

use crate::server::{Running, batch, holders, until};

const TTL: Duration = Duration::from_millis(400);

async fn start(worker_ttl: Option<Duration>) -> Running {
    Running::start(Config { worker_ttl, ..Config::default() }).await
}

/// How many workers the server knows, those that are left out included.
async fn known(server: &Running) -> f64 {
    server.series("kv_indexer_workers").await.expect("a series")
}

#[tokio::test]
async fn a_silent_worker_is_left_out_and_then_removed_while_another_stays() {
    let server = start(Some(TTL)).await;
    let mut client = server.client().await;
    client.apply_external_kv_batch(batch("talks", 1, &[1, 2])).await.expect("applied");
    client.apply_external_kv_batch(batch("silent", 1, &[1, 2])).await.expect("applied");
    assert_eq!(holders(&mut client, &[1]).await, ["silent", "talks"]);
    // Were this machine so slow that the other one is silent for a moment, its report brings it back.
    let mut talk = async || {
        client.apply_external_kv_batch(batch("talks", 2, &[1, 2])).await.expect("applied");
        holders(&mut client, &[1]).await
    };
    until(&mut talk, |holders| *holders == ["talks"]).await;
    let removed = until(
        async || {
            talk().await;
            server.series("kv_indexer_workers_removed_total{reason=\"silence\"}").await
        },
        |removed| *removed >= Some(1.0),
    );
    removed.await;
    until(async || (talk().await, known(&server).await).1, |known| *known == 1.0).await;
    let state = server.state().await;
    assert_eq!(state["workers"].as_array().map(Vec::len), Some(1), "{state:#}");
    assert_eq!(state["index"]["placements"]["HBM"], 2);
}

#[tokio::test]
async fn one_empty_batch_takes_a_silent_worker_back_with_all_it_holds() {
    let server = start(Some(TTL)).await;
    let mut client = server.client().await;
    // Silenced and heard again, round after round; a round in which the machine was so slow that the
    // worker has been removed meanwhile proves nothing.
    for round in 1.. {
        client.apply_external_kv_batch(batch("w", 1, &[1, 2])).await.expect("applied");
        until(async || holders(&mut client, &[1]).await, Vec::is_empty).await;
        client.apply_external_kv_batch(batch("w", 2, &[])).await.expect("applied");
        if holders(&mut client, &[1, 2]).await == ["w"] {
            break;
        }
        assert!(round < 100, "never back");
    }
}

#[tokio::test]
async fn without_a_time_to_live_nobody_is_left_out() {
    let (patient, server) = (start(None).await, start(Some(TTL)).await);
    let [mut without, mut with] = [patient.client().await, server.client().await];
    for client in [&mut without, &mut with] {
        client.apply_external_kv_batch(batch("w", 1, &[1])).await.expect("applied");
    }
    until(async || known(&server).await, |known| *known == 0.0).await;
    assert_eq!(holders(&mut without, &[1]).await, ["w"]);
    assert_eq!(patient.series("kv_indexer_silent_workers").await, Some(0.0));
}

#[tokio::test]
async fn a_fleet_that_falls_silent_together_is_kept_and_told_of() {
    let server = start(Some(TTL)).await;
    let mut client = server.client().await;
    let fleet = ["a", "b", "c", "d"];
    for worker in fleet {
        client.apply_external_kv_batch(batch(worker, 1, &[1])).await.expect("applied");
    }
    let suspected = async || server.series("kv_indexer_network_suspected").await;
    until(suspected, |suspected| *suspected == Some(1.0)).await;
    // Applied one after the other, they may have been left out for a moment before the last of them.
    until(async || holders(&mut client, &[1]).await, |holders| *holders == fleet).await;
    assert_eq!(server.state().await["network_suspected"], true);
    // Once half of them talk again, those who do not are dealt with one by one.
    let mut talk = async || {
        for worker in &fleet[..2] {
            client.apply_external_kv_batch(batch(worker, 2, &[1])).await.expect("applied");
        }
        holders(&mut client, &[1]).await
    };
    until(async || (talk().await, suspected().await).1, |suspected| *suspected == Some(0.0)).await;
    until(&mut talk, |holders| *holders == fleet[..2]).await;
    until(async || (talk().await, known(&server).await).1, |known| *known == 2.0).await;
}
