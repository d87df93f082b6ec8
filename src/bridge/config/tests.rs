//! Settings as an operator writes them, and what is refused.

use super::*;

fn read(pairs: &[(&'static str, &'static str)]) -> Result<Config, SettingError> {
    let worker = [("KV_INDEXER_WORKER_ID", "w0")];
    Config::read(&Settings::from_pairs(worker.into_iter().chain(pairs.iter().copied())))
}

#[test]
fn a_worker_id_is_enough() {
    let config = read(&[]).expect("defaults");
    assert_eq!(
        config,
        Config {
            worker_id: "w0".to_owned(),
            worker_address: String::new(),
            servers: vec!["http://[::1]:50051".to_owned()],
            idle_report: Some(Duration::from_secs(1)),
            mirror_blocks_max: 20_000_000,
            mirror_dir: None,
            credentials: Credentials::default(),
            source: Source {
                endpoint: "tcp://127.0.0.1:5557".to_owned(),
                bind: false,
                topic: String::new(),
                replay: None,
                heartbeat: Duration::from_secs(10),
            },
            rank: None,
            copies: Reading::Auto,
            grace: Some(Duration::from_secs(30)),
            clear_tiers: vec![Tier::TierHbm, Tier::TierDram, Tier::TierSsd],
            cache_spec: None,
        }
    );
}

#[test]
fn a_bad_value_names_its_variable() {
    let rows: &[(&'static str, &[&'static str])] = &[
        ("KV_INDEXER_WORKER_ID", &[" "]),
        (
            "KV_INDEXER_ENDPOINT",
            &["localhost:50051", "ftp://a:1", "http://", "unix:", "unix://", "http://:1"],
        ),
        (
            "SGLANG_KV_EVENT_ENDPOINT",
            &["127.0.0.1:5557", "tcp://127.0.0.1", "tcp://:5557", "tcp://h:65536", "udp://h:1", "ipc://"],
        ),
        ("SGLANG_KV_EVENT_BIND", &["maybe"]),
        ("SGLANG_KV_REPLAY_ENDPOINT", &["tcp://*:5558", "tcp://h", "5558"]),
        ("KV_INDEXER_HEARTBEAT_MS", &["0", "9", "-1", "10s"]),
        ("KV_INDEXER_RANK", &["-1", "first"]),
        ("KV_INDEXER_COPIES", &["both"]),
        ("KV_INDEXER_WORKER_GRACE_MS", &["-1", "30s"]),
        ("KV_INDEXER_IDLE_REPORT_MS", &["-1", "1s", ""]),
        ("KV_INDEXER_MIRROR_MAX_BLOCKS", &["0", "-1", "many", "4000000001"]),
        ("KV_INDEXER_CLEAR_TIERS", &["HBM,TAPE", ",", "HBM,"]),
        ("KV_INDEXER_CACHE_COMPONENTS", &["full,rnn", "full,"]),
        ("KV_INDEXER_SWA_WINDOW_TOKENS", &["0", "-1", "wide", "4294967296"]),
        ("KV_INDEXER_FULL_TIERS", &["L2"]),
        ("KV_INDEXER_SWA_TIERS", &["L2"]),
        ("KV_INDEXER_MAMBA_TIERS", &["L2"]),
        ("KV_INDEXER_CACHE_SPEC_VERSION", &["one", "-1"]),
    ];
    for (name, values) in rows {
        for value in *values {
            let error = read(&[(name, value)]).expect_err(value);
            assert_eq!((error.name, error.value.as_deref()), (*name, Some(*value)), "{error}");
        }
    }
    let error = Config::read(&Settings::default()).expect_err("no worker");
    assert_eq!(error.to_string(), "KV_INDEXER_WORKER_ID is not set: takes the worker's name in the index");
}

#[test]
fn components_make_a_spec() {
    let swa = [("KV_INDEXER_CACHE_COMPONENTS", "SWA"), ("KV_INDEXER_SWA_WINDOW_TOKENS", "128")];
    assert_eq!(
        read(&swa).expect("swa").cache_spec,
        Some(WorkerCacheSpec {
            version: 1,
            components: 3,
            swa_window_tokens: 128,
            full_tier_mask: 0b110,
            swa_tier_mask: 0b110,
            mamba_tier_mask: 0
        })
    );
    let all = [
        ("KV_INDEXER_CACHE_COMPONENTS", "full, mamba"),
        ("KV_INDEXER_FULL_TIERS", "gpu,cpu_pinned,disk"),
        ("KV_INDEXER_MAMBA_TIERS", "hbm"),
        ("KV_INDEXER_CACHE_SPEC_VERSION", "2"),
    ];
    assert_eq!(
        read(&all).expect("mamba").cache_spec,
        Some(WorkerCacheSpec {
            version: 2,
            components: 5,
            swa_window_tokens: 0,
            full_tier_mask: 0b1110,
            swa_tier_mask: 0,
            mamba_tier_mask: 0b10
        })
    );
    let error = read(&swa[..1]).expect_err("no window");
    assert_eq!((error.name, error.value), ("KV_INDEXER_SWA_WINDOW_TOKENS", None));
}

#[test]
fn the_bridge_binds_where_the_publisher_connects() {
    let rows = [
        ("tcp://127.0.0.1:5557", "auto", Some(("tcp://127.0.0.1:5557", false))),
        ("tcp://127.0.0.1:5557", "TRUE", Some(("tcp://127.0.0.1:5557", true))),
        ("tcp://engine-0:5557", "false", Some(("tcp://engine-0:5557", false))),
        ("tcp://[::1]:5557", "auto", Some(("tcp://[::1]:5557", false))),
        ("tcp://*:5557", "auto", Some(("tcp://0.0.0.0:5557", true))),
        ("tcp://0.0.0.0:5557", "auto", Some(("tcp://0.0.0.0:5557", true))),
        ("tcp://[::]:5557", "auto", Some(("tcp://[::]:5557", true))),
        ("ipc:///tmp/kv", "auto", Some(("ipc:///tmp/kv", false))),
        ("tcp://*:5557", "false", None),
    ];
    for (endpoint, bind, expected) in rows {
        let config = read(&[("SGLANG_KV_EVENT_ENDPOINT", endpoint), ("SGLANG_KV_EVENT_BIND", bind)]);
        let source = config.ok().map(|config| (config.source.endpoint, config.source.bind));
        let expected = expected.map(|(endpoint, bind)| (endpoint.to_owned(), bind));
        assert_eq!(source, expected, "{endpoint} {bind}");
    }
}

#[test]
fn servers_are_urls_or_sockets() {
    for server in ["http://a:1", "http://[::1]:50051", "unix:/tmp/kv", "unix:///tmp/kv"] {
        assert_eq!(read(&[("KV_INDEXER_ENDPOINT", server)]).expect(server).servers, [server]);
    }
    let over_tls = read(&[("KV_INDEXER_ENDPOINT", "https://a:1"), ("KV_INDEXER_CA_FILE", "ca.pem")]);
    assert_eq!(over_tls.expect("settings").servers, ["https://a:1"]);
}
