//! Reads the configuration's list of API servers.

use std::net::{IpAddr, SocketAddr};

use http::Uri;

use crate::ClientError;

/// Reads the URLs of servers: addresses or names, separated by commas. `port` is the port of those that have none.
pub fn urls(hosts: &str, port: &str) -> Result<Vec<Uri>, ClientError> {
    let port: u16 = port.parse().map_err(|_| ClientError::Port(port.to_owned()))?;
    let hosts = hosts.split(',').map(str::trim).filter(|host| !host.is_empty());
    let urls: Vec<Uri> = hosts.map(|host| url(host, port)).collect::<Result<_, _>>()?;
    if urls.is_empty() {
        return Err(ClientError::NoServer);
    }
    Ok(urls)
}

fn url(host: &str, port: u16) -> Result<Uri, ClientError> {
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let authority = match bracketed.unwrap_or(host).parse::<IpAddr>() {
        Ok(address) => SocketAddr::new(address, port).to_string(),
        Err(_) if host.contains(':') => host.to_owned(),
        Err(_) => format!("{host}:{port}"),
    };
    let url = format!("https://{authority}/").parse::<Uri>().ok();
    url.filter(|url| url.port_u16().is_some() && url.path() == "/")
        .ok_or_else(|| ClientError::Server(host.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::urls;

    fn read(hosts: &str, port: &str) -> Result<Vec<String>, String> {
        let urls = urls(hosts, port).map_err(|error| error.to_string())?;
        Ok(urls.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_list_names_servers_with_and_without_ports() {
        for (hosts, expected) in [
            ("192.0.2.10", &["https://192.0.2.10:6443/"][..]),
            (
                "192.0.2.10, 192.0.2.11:6444,",
                &["https://192.0.2.10:6443/", "https://192.0.2.11:6444/"],
            ),
            (
                "2001:db8::1,[2001:db8::2],[2001:db8::3]:6444",
                &[
                    "https://[2001:db8::1]:6443/",
                    "https://[2001:db8::2]:6443/",
                    "https://[2001:db8::3]:6444/",
                ],
            ),
            (
                "api.example.com,kubernetes.default.svc:443",
                &[
                    "https://api.example.com:6443/",
                    "https://kubernetes.default.svc:443/",
                ],
            ),
        ] {
            assert_eq!(read(hosts, "6443").unwrap(), expected, "{hosts}");
        }
    }

    #[test]
    fn what_names_no_server_is_refused_by_its_key() {
        for (hosts, port, expected) in [
            ("", "6443", "KUBERNETES_SERVICE_HOST names no API server"),
            (" , ", "6443", "KUBERNETES_SERVICE_HOST names no API server"),
            (
                "192.0.2.10,https://192.0.2.11:6443",
                "6443",
                "KUBERNETES_SERVICE_HOST: \"https://192.0.2.11:6443\"",
            ),
            (
                "a b",
                "6443",
                "KUBERNETES_SERVICE_HOST: \"a b\" is not an address",
            ),
            (
                "192.0.2.10/24",
                "6443",
                "KUBERNETES_SERVICE_HOST: \"192.0.2.10/24\"",
            ),
            ("a:port", "6443", "KUBERNETES_SERVICE_HOST: \"a:port\""),
            (
                "192.0.2.10",
                "https",
                "KUBERNETES_SERVICE_PORT: \"https\" is not a port",
            ),
        ] {
            let error = read(hosts, port).unwrap_err();
            assert!(error.starts_with(expected), "{hosts}: {error}");
        }
    }
}
