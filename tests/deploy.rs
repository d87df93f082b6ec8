//! What `deploy/` says against what the binaries really do: every series and label that
//! the dashboard and the alerts name is exposed, and every manifest is what its kind asks.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::bridge::{Bridge, numbered};
use common::publisher::Publisher;
use common::server::Recorder;
use serde_json::Value;
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::bridge::observe;
use sgl_kv_indexer::pb::ApplyExternalKvBatchRequest;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::server::{Config, Server};
use sgl_kv_indexer::settings::{Setting, Settings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Labels that Prometheus itself puts on what it scrapes.
const OF_THE_SCRAPE: [&str; 2] = ["instance", "job"];

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

fn text(path: &str) -> String {
    fs::read_to_string(deploy(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The documents of a YAML file.
fn yaml(path: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The labels of every series in the text of `/metrics`.
fn series(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.split("\",").filter_map(|label| label.split_once('=')).map(|(name, _)| name);
        found.entry(name.to_owned()).or_default().extend(labels.map(str::to_owned));
    }
    found
}

/// Every series of a server with a worker and of a bridge whose stream has a gap.
async fn exposed() -> BTreeMap<String, BTreeSet<String>> {
    let [listener, port] = [
        TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
        TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
    ];
    let (rpc, http) = (listener.local_addr().expect("bound"), port.local_addr().expect("bound"));
    let server = Server::new(Config::default(), Arc::new(Index::new())).with_http(port);
    tokio::spawn(server.serve(listener, std::future::pending()));
    let mut client = KvIndexerClient::connect(format!("http://{rpc}")).await.expect("a server");
    let worker = ApplyExternalKvBatchRequest { worker_id: "w0".to_owned(), ..Default::default() };
    client.apply_external_kv_batch(worker).await.expect("applied");
    let mut stream = TcpStream::connect(http).await.expect("a server");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let (_, of_server) = answer.split_once("\r\n\r\n").expect("a head");

    let mut publisher = Publisher::bind("").await;
    let recorder = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &recorder.url(), &[]);
    publisher.joined().await;
    publisher.send_frames(numbered(3)).await;
    bridge.until(|now| now.health.incomplete.is_some()).await;
    let page = observe::pages(bridge.statuses.clone())("/metrics").expect("a page");
    let of_bridge = String::from_utf8(page.body.to_vec()).expect("UTF-8");
    bridge.stop().await;

    let mut all = series(of_server);
    all.extend(series(&of_bridge));
    all
}

/// Names in a piece of PromQL that begin like ours, each with the text behind it.
fn named(expression: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("kv_indexer_") {
        let tail = &rest[at..];
        let end = tail.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(tail.len());
        found.push((&tail[..end], &tail[end..]));
        rest = &tail[end..];
    }
    found
}

/// Label names before `=` or `=~` in the braces that `text` may begin with.
fn matched(text: &str) -> Vec<&str> {
    let Some(inside) = text.strip_prefix('{').and_then(|text| text.split('}').next()) else {
        return Vec::new();
    };
    inside.split(',').filter_map(|part| part.split_once('=')).map(|(name, _)| name.trim()).collect()
}

/// Label names in every `by (…)`.
fn grouped(expression: &str) -> Vec<&str> {
    let groups = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    groups.flat_map(|names| names.split(',')).map(str::trim).collect()
}

/// Names between `before` and `after`, as in `{{worker}}`.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Vec<&'a str> {
    text.split(before).skip(1).filter_map(|rest| rest.split(after).next()).map(str::trim).collect()
}

/// Checks an expression and the labels that its text shows; returns how many series it names.
fn check(exposed: &BTreeMap<String, BTreeSet<String>>, expression: &str, shown: &[&str]) -> usize {
    let named = named(expression);
    let mut labels: BTreeSet<&str> = OF_THE_SCRAPE.into();
    for (name, behind) in &named {
        let has = exposed.get(*name).unwrap_or_else(|| panic!("{name} is not exposed: {expression}"));
        for label in matched(behind) {
            assert!(
                has.contains(label) || OF_THE_SCRAPE.contains(&label),
                "{name} has no label {label}: {expression}"
            );
        }
        labels.extend(has.iter().map(String::as_str));
    }
    for label in grouped(expression).iter().chain(shown) {
        assert!(labels.contains(label), "no label {label}: {expression}");
    }
    named.len()
}

#[tokio::test]
async fn the_alerts_name_what_is_exposed() {
    let exposed = exposed().await;
    let [rules] = yaml("prometheus/rules.yaml").try_into().expect("one document");
    let mut checked = 0;
    for group in rules["groups"].as_array().expect("groups") {
        for rule in group["rules"].as_array().expect("rules") {
            let alert = rule["alert"].as_str().expect("a name");
            let expression = rule["expr"].as_str().expect("an expression");
            let told = format!("{} {}", rule["annotations"]["summary"], rule["annotations"]["description"]);
            let shown = between(&told, "$labels.", " }}");
            assert!(check(&exposed, expression, &shown) > 0, "{alert} names nothing");
            assert!(rule["labels"]["severity"].is_string(), "{alert} has no severity");
            assert!(rule["annotations"]["summary"].is_string(), "{alert} has no summary");
            checked += 1;
        }
    }
    assert!(checked > 12, "{checked} alerts");
}

#[tokio::test]
async fn the_dashboard_names_what_is_exposed() {
    let exposed = exposed().await;
    let dashboard: Value = serde_json::from_str(&text("grafana/kv-indexer.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut series = 0;
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{panel}");
        for target in targets {
            let shown = between(target["legendFormat"].as_str().expect("a legend"), "{{", "}}");
            series += check(&exposed, target["expr"].as_str().expect("an expression"), &shown);
        }
    }
    let notes = dashboard["annotations"]["list"].as_array().expect("annotations");
    series += notes
        .iter()
        .map(|note| check(&exposed, note["expr"].as_str().unwrap_or_default(), &[]))
        .sum::<usize>();
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        series += check(&exposed, variable["query"].as_str().unwrap_or_default(), &[]);
    }
    assert!(series > 40, "{series} series");
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "panels share an id");
}

#[test]
fn an_expression_that_is_wrong_is_found() {
    let exposed = series("kv_indexer_rpcs_total{method=\"m\",code=\"OK\"} 1\n");
    let wrong = |expression: &str, shown: &[&str]| {
        let (expression, exposed) = (expression.to_owned(), exposed.clone());
        let shown: Vec<String> = shown.iter().map(|label| (*label).to_owned()).collect();
        std::panic::catch_unwind(move || {
            check(&exposed, &expression, &shown.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .is_err()
    };
    assert!(!wrong(
        "sum by (method) (rate(kv_indexer_rpcs_total{code=\"OK\",instance=\"x\"}[5m]))",
        &["code"]
    ));
    assert!(wrong("kv_indexer_rpc_total", &[]));
    assert!(wrong("kv_indexer_rpcs_total{status=\"OK\"}", &[]));
    assert!(wrong("sum by (status) (kv_indexer_rpcs_total)", &[]));
    assert!(wrong("kv_indexer_rpcs_total", &["worker"]));
}

/// Names and plain values of a container's environment.
fn environment(container: &Value) -> Vec<(&str, &str)> {
    let list = container["env"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|one| Some((one["name"].as_str()?, one["value"].as_str()?))).collect()
}

/// The settings that a binary takes, by the name of its container.
fn table(container: &str) -> &'static [Setting] {
    match container {
        "server" => sgl_kv_indexer::server::SETTINGS,
        "bridge" => sgl_kv_indexer::bridge::config::TABLE,
        other => panic!("{other} is no binary of ours"),
    }
}

const MANIFESTS: [&str; 6] = [
    "kubernetes/base/server.yaml",
    "kubernetes/base/bridge.yaml",
    "kubernetes/base/networkpolicy.yaml",
    "kubernetes/base/servicemonitor.yaml",
    "kubernetes/secured/server.yaml",
    "kubernetes/secured/bridge.yaml",
];

fn manifests() -> Vec<Value> {
    MANIFESTS.iter().flat_map(|path| yaml(path)).collect()
}

fn of_kind<'a>(manifests: &'a [Value], kind: &str) -> Vec<&'a Value> {
    manifests.iter().filter(|manifest| manifest["kind"] == kind).collect()
}

/// The containers of all deployments.
fn containers(manifests: &[Value]) -> Vec<&Value> {
    let deployments = of_kind(manifests, "Deployment").into_iter();
    let lists = deployments.map(|deployment| &deployment["spec"]["template"]["spec"]["containers"]);
    lists.flat_map(|list| list.as_array().expect("containers")).collect()
}

#[test]
fn manifests_set_what_the_binaries_take() {
    let manifests = manifests();
    for manifest in &manifests {
        assert!(manifest["apiVersion"].is_string() && manifest["metadata"]["name"].is_string(), "{manifest}");
    }
    let containers = containers(&manifests);
    assert_eq!(containers.len(), 4);
    for container in containers {
        let known = table(container["name"].as_str().expect("a name"));
        let environment = environment(container);
        assert!(environment.len() > 2, "{container}");
        for (name, _) in &environment {
            assert!(known.iter().any(|setting| setting.name == *name), "{name} is no setting");
        }
        // What a patch leaves to files cannot be read here; the rest is.
        if container["name"] == "server" && container["ports"].is_array() {
            let pairs = environment.iter().map(|(name, value)| {
                let pair: (&'static str, &'static str) =
                    ((*name).to_owned().leak(), (*value).to_owned().leak());
                pair
            });
            let config = Config::from_settings(&Settings::from_pairs(pairs)).expect("settings");
            let port = |name: &str| {
                let ports = container["ports"].as_array().expect("ports");
                ports.iter().find(|port| port["name"] == name).expect(name)["containerPort"].as_u64()
            };
            assert_eq!(port("grpc"), Some(config.listen_addr.port().into()));
            assert_eq!(port("http"), config.http_addr.map(|address| address.port().into()));
        }
    }
    let map =
        of_kind(&manifests, "ConfigMap")[0]["data"]["streams.toml"].as_str().expect("streams").to_owned();
    let path = std::env::temp_dir().join(format!("kv-indexer-deploy-{}.toml", std::process::id()));
    fs::write(&path, map).expect("written");
    let file: &'static str = path.to_str().expect("UTF-8").to_owned().leak();
    let streams =
        sgl_kv_indexer::bridge::streams::read(&Settings::from_pairs([("KV_INDEXER_STREAMS", file)]));
    fs::remove_file(&path).expect("removed");
    assert_eq!(streams.expect("streams").len(), 1);
}

#[test]
fn manifests_fit_each_other() {
    let manifests = manifests();
    let labels: Vec<&Value> = of_kind(&manifests, "Deployment")
        .into_iter()
        .map(|deployment| &deployment["spec"]["template"]["metadata"]["labels"])
        .filter(|labels| labels.is_object())
        .collect();
    let selects = |selector: &Value| {
        labels.iter().any(|labels| {
            selector.as_object().expect("labels").iter().all(|(key, value)| labels[key] == *value)
        })
    };
    for service in of_kind(&manifests, "Service") {
        assert!(selects(&service["spec"]["selector"]), "{service}");
    }
    for policy in of_kind(&manifests, "NetworkPolicy") {
        assert!(selects(&policy["spec"]["podSelector"]["matchLabels"]), "{policy}");
    }
    let pages = observe::pages(sgl_kv_indexer::bridge::Bridge::new(Vec::new()).statuses());
    let mut probes = 0;
    for container in containers(&manifests) {
        for kind in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let Some(probe) = container.get(kind) else { continue };
            let path = probe["httpGet"]["path"].as_str().expect("a path");
            assert!(pages(path).is_some(), "{path} is no page");
            assert_eq!(probe["httpGet"]["port"], "http", "{probe}");
            probes += 1;
        }
    }
    assert_eq!(probes, 5);
    for folder in ["base", "secured"] {
        let [kustomization] =
            yaml(&format!("kubernetes/{folder}/kustomization.yaml")).try_into().expect("one document");
        let named = kustomization["resources"].as_array().into_iter().flatten();
        let patched = kustomization["patches"].as_array().into_iter().flatten().map(|patch| &patch["path"]);
        for path in named.chain(patched) {
            let path = format!("kubernetes/{folder}/{}", path.as_str().expect("a path"));
            assert!(deploy(&path).exists(), "{path} is not there");
        }
    }
}

#[test]
fn image_and_units_run_the_binaries_as_nobody() {
    let image = text("Dockerfile");
    let lines = |word: &str| image.lines().filter_map(|line| line.strip_prefix(word)).collect::<Vec<_>>();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for line in lines("COPY ").iter().filter(|line| !line.starts_with("--from")) {
        let mut words: Vec<&str> = line.split(' ').collect();
        words.pop();
        assert!(words.iter().all(|path| root.join(path).exists()), "{line}");
    }
    for binary in ["kv-indexer-server", "kv-indexer-bridge"] {
        assert!(image.contains(&format!("release/{binary} ")), "{binary} is not in the image");
    }
    let known = [table("server"), table("bridge")].concat();
    for pair in lines("ENV ").iter().flat_map(|line| line.split(' ')) {
        let (name, _) = pair.split_once('=').expect("a pair");
        let is_setting = known.iter().any(|setting| setting.name == name);
        assert!(is_setting || name == "KV_INDEXER_COMMIT", "{name} is no setting");
    }
    let user =
        lines("USER ")[0].split(':').next().and_then(|user| user.parse::<u64>().ok()).expect("a number");
    for deployment in of_kind(&manifests(), "Deployment") {
        let context = &deployment["spec"]["template"]["spec"]["securityContext"];
        assert!(context.get("runAsUser").is_none_or(|id| id.as_u64() == Some(user)), "{context}");
    }
    for (unit, binary) in [
        ("kv-indexer-server.service", "kv-indexer-server"),
        ("kv-indexer-bridge@.service", "kv-indexer-bridge"),
    ] {
        let unit = text(&format!("systemd/{unit}"));
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        assert!(value("ExecStart").is_some_and(|path| path.ends_with(binary)), "{unit}");
        assert_eq!((value("DynamicUser"), value("RestartPreventExitStatus")), (Some("yes"), Some("2")));
        assert!(value("TimeoutStopSec").and_then(|seconds| seconds.parse::<u32>().ok()) >= Some(10));
    }
}
