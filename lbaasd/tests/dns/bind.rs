//! BIND's named with a zone that takes updates.

use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, chown};
use std::process::Command;
use std::time::SystemTime;

use hickory_proto::rr::rdata::tsig::TsigAlgorithm;
use lbaasd::dns::updates::{Key, Updates};

use crate::{Folder, Process, ZONE, local, port, ready};

/// A zone that the key may not write.
pub const CLOSED: &str = "closed.example.com";
/// The user "nobody".
const NOBODY: u32 = 65534;
const ZONE_FILE: &str = "$TTL 300
@ IN SOA ns hostmaster 1 3600 600 86400 30
@ IN NS ns
ns IN A 127.0.0.1
foreign.red IN A 198.51.100.1
alias.red IN CNAME foreign.red
text.red IN TXT \"somebody's\"
";

pub struct Named {
    pub address: SocketAddr,
    _process: Process,
    _folder: Folder,
}

pub fn key() -> Key {
    Key {
        name: "lbaasd".into(),
        algorithm: TsigAlgorithm::HmacSha256,
        secret: b"a secret of thirty-two bytes....".to_vec(),
    }
}

/// Returns lbaasd's part, with the key and clock of the test.
pub fn updates(server: SocketAddr, zone: &str, key: Key, clock: fn() -> SystemTime) -> Updates {
    Updates::new(server, zone, key, clock).unwrap()
}

pub fn usual(server: SocketAddr) -> Updates {
    updates(server, ZONE, key(), SystemTime::now)
}

impl Named {
    pub async fn start() -> Self {
        let (folder, port) = (Folder::new(), port());
        let secret = data_encoding::BASE64.encode(&key().secret);
        let path = folder.path("");
        let zone = |name: &str, file: &str, rights: &str| {
            format!("zone \"{name}\" {{ type primary; file \"{file}\"; allow-update {{ {rights}; }}; }};\n")
        };
        let options = format!(
            "options {{ directory \"{path}\"; pid-file \"{path}pid\"; session-keyfile \"{path}session.key\";
            managed-keys-directory \"{path}\"; listen-on port {port} {{ 127.0.0.1; }}; listen-on-v6 {{ none; }};
            recursion no; dnssec-validation no; notify no; }};
            controls {{ }};
            key \"lbaasd\" {{ algorithm hmac-sha256; secret \"{secret}\"; }};\n"
        );
        let zones = zone(ZONE, "apps.zone", "key lbaasd") + &zone(CLOSED, "closed.zone", "none");
        for file in ["apps.zone", "closed.zone"] {
            folder.write(file, ZONE_FILE);
        }
        let settings = folder.write("named.conf", &(options + &zones));
        let mut command = Command::new("/usr/sbin/named");
        command.args(["-f", "-n", "1", "-c", &settings]);
        if folder.0.metadata().unwrap().uid() == 0 {
            command.args(["-u", "nobody"]);
            chown(&folder.0, Some(NOBODY), None).unwrap();
            for file in std::fs::read_dir(&folder.0).unwrap().flatten() {
                chown(file.path(), Some(NOBODY), None).unwrap();
            }
        }
        let named = Self {
            address: local(port),
            _process: Process::start(&mut command),
            _folder: folder,
        };
        ready(&usual(named.address)).await;
        named
    }
}
