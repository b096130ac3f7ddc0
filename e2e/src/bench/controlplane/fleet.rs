//! Nodes as objects only, and their hollow droplets: each with its Node, its transitd pod, that pod's token, its
//! Droplet and its stream. transitd's own task looks after the Droplet.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::PostParams};
use serde_json::json;
use thuban_api::{Droplet, DropletSpec, SYSTEM_NAMESPACE};
use tokio::task::JoinHandle;
use transitd::{
    dial::lease::Locator,
    operator::{client, epoch::Epoch},
    tasks::register,
};

use super::{
    hollow::{Book, Hollow},
    plane::{self, Plane},
    progress::{patience, until},
};

/// Parallel requests while a droplet is made.
const PARALLEL: usize = 24;

pub struct Fleet {
    pub droplets: Vec<Arc<Hollow>>,
    /// Two tasks of each droplet.
    tasks: Vec<JoinHandle<()>>,
    folder: Folder,
}

/// Folder of tokens and epochs of all droplets. It is in memory, because a thousand nodes have a thousand disks.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn node_name(number: usize) -> String {
    format!("d{number}")
}

fn address(number: usize) -> Ipv4Addr {
    // 100.64.0.0/16, none of whose last octets is 0 or 255.
    Ipv4Addr::new(100, 64, (number / 250) as u8, (number % 250 + 1) as u8)
}

/// Returns the number of the droplet with an address.
pub fn number_of(address: Ipv4Addr) -> Option<usize> {
    let [100, 64, high, low] = address.octets() else {
        return None;
    };
    Some(usize::from(high) * 250 + usize::from(low.checked_sub(1)?))
}

impl Fleet {
    pub fn new(plane: &Plane) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() {
            memory.to_owned()
        } else {
            plane.state()
        };
        let folder = base.join(format!("thuban-scale-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self {
            droplets: Vec::new(),
            tasks: Vec::new(),
            folder: Folder(folder),
        })
    }

    /// Adds droplets up to the total, and waits until each has applied its snapshot and is accepted.
    pub async fn grow(&mut self, plane: &Plane, book: &Arc<Book>, total: usize) -> Result<()> {
        let from = self.droplets.len();
        let folder = self.folder.0.clone();
        let mut made = stream::iter(from..total)
            .map(|number| make(plane, number, folder.join(node_name(number))))
            .buffered(PARALLEL);
        let mut said = std::time::Instant::now();
        while let Some(token) = made.try_next().await? {
            self.dial(plane, book, token)?;
            if said.elapsed() > Duration::from_secs(5) {
                println!("  droplets: {} of {total} made", self.droplets.len());
                said = std::time::Instant::now();
            }
        }
        drop(made);
        until("droplets with a snapshot", total, patience(total), || {
            let synced = self.droplets.iter().filter(|droplet| droplet.synced().is_some());
            Ok(synced.count())
        })
        .await
    }

    /// Starts a droplet's stream with the token in that file.
    fn dial(&mut self, plane: &Plane, book: &Arc<Book>, token: PathBuf) -> Result<()> {
        let number = self.droplets.len();
        let name = node_name(number);
        let epoch = Epoch::open(token.with_extension("epoch"))?;
        let droplet = Arc::new(Hollow::new(name, token, Arc::clone(book)));
        let locator = Locator::by_lease(plane.transitd.clone(), SYSTEM_NAMESPACE, client::LEASE);
        self.tasks
            .push(tokio::spawn(client::run(Arc::clone(&droplet), locator, epoch)));
        let (registered, droplets) = (Arc::clone(&droplet), Api::all(plane.transitd.clone()));
        self.tasks.push(tokio::spawn(async move {
            let has_stream = || registered.has_stream();
            register::keep(|| spec(number), has_stream, &registered.opened, &droplets).await;
        }));
        self.droplets.push(droplet);
        Ok(())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Makes all objects of a droplet; returns the file with its token.
async fn make(plane: &Plane, number: usize, file: PathBuf) -> Result<PathBuf> {
    let name = node_name(number);
    let admin = || plane.admin.clone();
    let parameters = PostParams::default();
    let failed = || format!("making droplet {name}");
    let address = address(number).to_string();
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "capacity": {"cpu": "64", "memory": "256Gi", "pods": "250"},
            "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "250"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}],
        },
    }))?;
    Api::<Node>::all(admin())
        .create(&parameters, &node)
        .await
        .with_context(failed)?;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": format!("transitd-{name}"), "labels": {"app.kubernetes.io/name": "transitd"}},
        "spec": {
            "nodeName": name, "hostNetwork": true, "serviceAccountName": "transitd",
            "containers": [{"name": "transitd", "image": "thuban.dev/transitd:0.1.0"}],
        },
    }))?;
    let pod = Api::<Pod>::namespaced(admin(), SYSTEM_NAMESPACE)
        .create(&parameters, &pod)
        .await
        .with_context(failed)?;
    let bound = (pod.name_any(), pod.uid().unwrap_or_default());
    let token = plane::token(&plane.admin, "transitd", Some(bound)).await?;
    fs::write(&file, token).with_context(|| format!("writing {}", file.display()))?;
    Api::<Droplet>::all(admin())
        .create(&parameters, &Droplet::new(&name, spec(number)))
        .await
        .with_context(failed)?;
    Ok(file)
}

/// Returns what a droplet says of itself.
fn spec(number: usize) -> DropletSpec {
    DropletSpec {
        node: node_name(number),
        ip: address(number).to_string(),
        interface: "eth0".into(),
        mtu: 1500,
        transit_hook: "tc".into(),
        agent_hook: "tc".into(),
        limit_queue: String::new(),
        program_version: env!("CARGO_PKG_VERSION").into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{address, number_of};

    #[test]
    fn a_droplet_is_known_by_its_address() {
        for number in [0, 1, 249, 250, 4_999, 9_999] {
            assert_eq!(number_of(address(number)), Some(number));
        }
        assert_eq!(number_of([100, 64, 0, 0].into()), None);
        assert_eq!(number_of([10, 64, 0, 1].into()), None);
    }
}
