//! Reads objects as `kubectl get … -o json` does, by connections that stay open: tests ask many times a second, and each
//! kubectl is a process that first learns what the API server has.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::Value;
use thuban_cluster::Cluster;
use tokio::runtime::Runtime;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Objects of a kind.
#[derive(Clone, Debug)]
struct Resource {
    /// `/api/v1`, `/apis/thuban.dev/v1alpha1`.
    base: String,
    plural: String,
    is_namespaced: bool,
}

struct Api {
    runtime: Arc<Runtime>,
    client: Client,
    /// By plural, singular and short names, and by `plural.group`.
    resources: HashMap<String, Resource>,
}

/// What `kubectl get` is asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Question<'a> {
    kind: &'a str,
    name: Option<&'a str>,
    namespace: Option<&'a str>,
    is_everywhere: bool,
    /// `labelSelector` and `fieldSelector`.
    selectors: Vec<(&'static str, &'a str)>,
}

/// The object, or the list of objects, that `kubectl get` prints for these arguments.
pub fn get(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    static API: Mutex<Option<Api>> = Mutex::new(None);
    let question = Question::read(arguments)?;
    let (client, runtime, path) = {
        let mut api = API.lock().unwrap_or_else(PoisonError::into_inner);
        if !api
            .as_ref()
            .is_some_and(|api| api.resources.contains_key(question.kind))
        {
            // The first question, or the kind came later.
            *api = Some(Api::new(cluster)?);
        }
        let api = api.as_ref().context("an API")?;
        let resource = api.resources.get(question.kind);
        let resource = resource.with_context(|| format!("the server has no {}", question.kind))?;
        (api.client.clone(), api.runtime.clone(), question.path(resource))
    };
    runtime.block_on(ask(client, &path))
}

async fn ask(client: Client, path: &str) -> Result<Value> {
    let request = http::Request::get(path).body(Vec::new())?;
    let answer = tokio::time::timeout(TIMEOUT, client.request(request)).await;
    answer
        .context("the API server is silent")?
        .with_context(|| path.to_owned())
}

impl Api {
    fn new(cluster: &Cluster) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let runtime = Arc::new(runtime);
        let kubeconfig = Kubeconfig::read_from(cluster.instance().kubeconfig())?;
        let (client, resources) = runtime.block_on(async {
            let config =
                kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
            let client = Client::try_from(config)?;
            let resources = resources(&client).await?;
            anyhow::Ok((client, resources))
        })?;
        Ok(Self {
            runtime,
            client,
            resources,
        })
    }
}

async fn resources(client: &Client) -> Result<HashMap<String, Resource>> {
    let mut bases = vec![(String::new(), "/api/v1".to_owned())];
    let groups = ask(client.clone(), "/apis").await?;
    for group in groups["groups"].as_array().into_iter().flatten() {
        let name = group["name"].as_str().unwrap_or_default();
        let version = group["preferredVersion"]["groupVersion"]
            .as_str()
            .unwrap_or_default();
        bases.push((name.to_owned(), format!("/apis/{version}")));
    }
    let mut all = HashMap::new();
    for (group, base) in bases {
        let list = ask(client.clone(), &base).await?;
        for one in list["resources"].as_array().into_iter().flatten() {
            let plural = one["name"].as_str().unwrap_or_default();
            if plural.contains('/') {
                continue;
            }
            let resource = Resource {
                base: base.clone(),
                plural: plural.to_owned(),
                is_namespaced: one["namespaced"] == true,
            };
            let short = one["shortNames"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            let singular = one["singularName"].as_str().filter(|name| !name.is_empty());
            for name in short.chain(singular).chain([plural]) {
                // The first group that has a name keeps it, as it does for kubectl.
                all.entry(name.to_owned()).or_insert_with(|| resource.clone());
            }
            all.insert(format!("{plural}.{group}"), resource);
        }
    }
    Ok(all)
}

impl<'a> Question<'a> {
    fn read(arguments: &[&'a str]) -> Result<Self> {
        let mut question = Self::default();
        let mut rest = arguments.iter().copied();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().with_context(|| format!("{argument} has no value"));
            match argument {
                "-n" => question.namespace = Some(value()?),
                "-A" => question.is_everywhere = true,
                "-l" => question.selectors.push(("labelSelector", value()?)),
                "--field-selector" => question.selectors.push(("fieldSelector", value()?)),
                _ => {
                    if let Some(selector) = argument.strip_prefix("--field-selector=") {
                        question.selectors.push(("fieldSelector", selector));
                    } else if argument.starts_with('-') || question.name.is_some() {
                        bail!("{argument:?} in {arguments:?}: ask kubectl itself");
                    } else if !question.kind.is_empty() {
                        question.name = Some(argument);
                    } else if let Some((kind, name)) = argument.split_once('/') {
                        (question.kind, question.name) = (kind, Some(name));
                    } else {
                        question.kind = argument;
                    }
                }
            }
        }
        Ok(question)
    }

    fn path(&self, resource: &Resource) -> String {
        let mut parts = vec![resource.base.as_str()];
        if resource.is_namespaced && !self.is_everywhere {
            parts.extend(["namespaces", self.namespace.unwrap_or("default")]);
        }
        parts.push(&resource.plural);
        parts.extend(self.name);
        let selectors = self.selectors.iter().map(|(key, value)| {
            let value = value
                .replace('%', "%25")
                .replace('=', "%3D")
                .replace(',', "%2C")
                .replace(' ', "%20");
            format!("{key}={}", value.replace('!', "%21"))
        });
        let selectors: Vec<String> = selectors.collect();
        let path = parts.join("/");
        if selectors.is_empty() {
            path
        } else {
            format!("{path}?{}", selectors.join("&"))
        }
    }
}
