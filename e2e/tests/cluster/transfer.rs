//! A bulk TCP transfer between two pods, checked byte by byte.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::support::Pod;

/// Sends `length` bytes to a server in the other pod, which sends them back.
pub fn echo(client: &Pod, server: &Pod, length: usize) -> Result<()> {
    let listener = server.inside(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    let port = listener.local_addr()?.port();
    let data: Vec<u8> = (0..length).map(|index| (index * 31 % 251) as u8).collect();
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            let mut received = Vec::new();
            stream.read_to_end(&mut received)?;
            stream.write_all(&received).context("send back")
        });
        let mut stream = client.inside(|| {
            let address = SocketAddr::from((server.address, port));
            TcpStream::connect_timeout(&address, Duration::from_secs(5)).context("connect")
        })?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.set_write_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(&data).context("send")?;
        stream.shutdown(Shutdown::Write)?;
        let mut back = Vec::new();
        stream.read_to_end(&mut back).context("receive")?;
        echo.join()
            .map_err(|_| anyhow::anyhow!("the echo thread panicked"))??;
        ensure!(
            back == data,
            "{} bytes came back, not the {length} that were sent",
            back.len()
        );
        Ok(())
    })
}
