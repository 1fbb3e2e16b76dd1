"""Files of requests in, files of results out: any number of lines, and nothing twice."""
